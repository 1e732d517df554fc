"""Weight map: which stored tensors hold each leaf. The `names` of an architecture map the path of a leaf to

    (name of the stored tensor, transform)              the transform as in `_rearrange.py`: "(n h) d -> d n h"

- `{i}` in paths and names is the index of the layer, `{n}` in names is the number of layers. An entry may be for a leaf that only
  some layers have, or none (some layers are dense, others have experts).
- Several leaves that are stored in one tensor have the same name, and a plus in their transforms; they stand in it in the order
  in which the map lists them:
      "layers.{i}.mlp.gate_DF": ("model.layers.{i}.mlp.gate_up_proj.weight", "+f d -> d f"),
      "layers.{i}.mlp.up_DF":   ("model.layers.{i}.mlp.gate_up_proj.weight", "+f d -> d f"),
- A leaf that is stored in many tensors has a name with braces around one of its dims, which the left side of the transform lacks.
  There is one tensor for each index of this dim, and it is read only if it is needed:
      "layers.{i}.mlp.gate_EDF": ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "f d -> e d f"),
  One entry may have both a plus in its transform and braces in its name.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.models.hf._rearrange import WHOLE, Place, Rearrange, parse_rearrange

__all__ = ["StoredLeaf", "map_leaves_to_stored"]

Fetch = Callable[[str, tuple[slice, ...]], Tensor]


@dataclass(frozen=True)
class StoredLeaf:
    """Where a leaf of (padded) `shape` is stored: in tensor `names[0]`, or in one of `names` for each index of dim `outer`."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    outer: int | None
    transform: Rearrange
    sizes: Mapping[str, int]
    place: Place = WHOLE

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors."""
        return self.transform.stored_shape(self.sizes, self.place)

    def read(self, fetch: Fetch, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The elements of the leaf within `bounds`; `fetch(name, block)` reads a block of a stored tensor."""
        inner = [bound for dim, bound in enumerate(bounds) if dim != self.outer]

        def read_tensor(name: str) -> Tensor:
            return self.transform.read(lambda block: fetch(name, block), self.sizes, inner, self.place)

        if self.outer is None:
            return read_tensor(self.names[0])
        tensors = [read_tensor(name) for name in self.names[slice(*bounds[self.outer])]]
        if tensors:
            return torch.stack(tensors, self.outer)
        empty = self.transform.read(lambda block: fetch(self.names[0], block), self.sizes, [(0, 0)] * len(inner), self.place)
        return empty.new_empty([stop - start for start, stop in bounds])

    def write(self, leaf: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Copy the leaf to its place in its tensors in `stored`, whose dtypes may be others."""
        for name, part in zip(self.names, [leaf] if self.outer is None else leaf.unbind(self.outer), strict=True):
            self.transform.write(stored[name], part.detach(), self.sizes, self.place)

    @property
    def slow_dim(self) -> int | None:
        """The dim of the leaf that varies slowest where it is stored: a slice of it is read in few runs. None for a scalar."""
        if self.outer is not None:
            return self.outer
        slowest = next((name for names in self.transform.stored for name in names if name in self.transform.leaf), None)
        return None if slowest is None else self.transform.leaf.index(slowest)

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """The shape of the leaf without padding."""
        inner = iter(self.sizes[name] for name in self.transform.leaf)
        return tuple(size if dim == self.outer else next(inner) for dim, size in enumerate(self.shape))


def map_leaves_to_stored(
    names: Mapping[str, tuple[str, str]], shapes: Mapping[str, tuple[int, ...]], vocab_size: int
) -> dict[str, StoredLeaf]:
    """For the path of each leaf where it is stored. `shapes` has the shapes of the leaves, in which the vocabulary may be padded.

    Raises ConfigError for leaves that `names` lacks, and for entries whose name and transform do not fit each other.
    """
    keys = {path: path if path in names else re.sub(r"\.\d+\.", ".{i}.", path, count=1) for path in shapes}
    missing = sorted({key for key in keys.values() if key not in names})
    if missing:
        raise ConfigError(f"the weight map has no stored tensor for {', '.join(missing)}")
    leaves = {path: _stored_leaf(path, shape, *names[keys[path]], vocab_size) for path, shape in shapes.items()}
    index_in_map = {key: i for i, key in enumerate(names)}
    paths_of_tensor: dict[str, list[str]] = {}
    for path in sorted(leaves, key=lambda path: index_in_map[keys[path]]):
        paths_of_tensor.setdefault(leaves[path].names[0], []).append(path)
    for paths in paths_of_tensor.values():
        if len(paths) > 1 and not all(leaves[path].transform.is_part for path in paths):
            raise ConfigError(f"{', '.join(paths)} are all stored in {leaves[paths[0]].names[0]}: their transforms need a plus")
        for path, place in zip(paths, _places([leaves[path] for path in paths]), strict=True):
            leaf = leaves[path]
            leaves[path] = StoredLeaf(leaf.shape, leaf.names, leaf.outer, leaf.transform, leaf.sizes, place)
    return leaves


def _stored_leaf(path: str, shape: tuple[int, ...], name: str, text: str, vocab_size: int) -> StoredLeaf:
    index = re.search(r"\.(\d+)\.", path)
    if index is not None:
        name = name.replace("{i}", index[1])
    braces = re.findall(r"\{(\w+)\}", name)
    leaf_names = text.partition("->")[2].split()
    if len(braces) > 1 or any(brace not in leaf_names for brace in braces) or len(leaf_names) != len(shape):
        raise ConfigError(
            f"cannot store {path} {shape} in {name} by {text!r}: the transform must name each dim of the leaf, and there may be "
            "one name in braces, which is a dim of the leaf"
        )
    sizes = dict(zip(leaf_names, shape, strict=True))
    if "v" in sizes:
        sizes["v"] = vocab_size
    if not braces:
        return StoredLeaf(shape, (name,), None, parse_rearrange(text), sizes)
    (brace,) = braces
    inner = " ".join(n for n in leaf_names if n != brace)
    transform = parse_rearrange(f"{text.partition('->')[0]}-> {inner}")
    tensor_names = tuple(name.replace(f"{{{brace}}}", str(e)) for e in range(sizes[brace]))
    return StoredLeaf(shape, tensor_names, leaf_names.index(brace), transform, sizes)


def _places(leaves: Sequence[StoredLeaf]) -> Iterator[Place]:
    """Where each of `leaves`, which share one stored tensor, is in it."""
    joined = [leaf.transform.joined for leaf in leaves]
    lengths = [0 if dim is None else leaf.transform.part_shape(leaf.sizes)[dim] for leaf, dim in zip(leaves, joined, strict=True)]
    for i in range(len(leaves)):
        yield Place(i, len(leaves), sum(lengths[:i]), sum(lengths) or None)
