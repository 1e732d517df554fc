"""Weight map: which stored tensors each leaf is made of. An architecture's `names` maps the path of a leaf to

    (name of the stored tensor, transform)              the transform as in `_rearrange.py`: "(n h) d -> d n h"

- `{i}` in paths and names is the layer, `{n}` in names the number of layers. Leaves that only some layers have (dense layers
  first, experts later) need no more than an entry; entries without a leaf are never looked at.
- Several leaves of one stored tensor have the same name and a plus in their transforms; they stand in it in the order in which
  the map lists them:
      "layers.{i}.mlp.gate_DF": ("model.layers.{i}.mlp.gate_up_proj.weight", "+f d -> d f"),
      "layers.{i}.mlp.up_DF":   ("model.layers.{i}.mlp.gate_up_proj.weight", "+f d -> d f"),
- One leaf of many stored tensors has another name in braces, a dim of the leaf that the left side lacks: as many tensors as that
  dim has indices, each read only if it is needed:
      "layers.{i}.mlp.gate_EDF": ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "f d -> e d f"),
  Both go together: a plus in the transform, and braces in the name.
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
    """Where a leaf of (padded) `shape` is stored: in the tensor `names[0]`, or one tensor for each index of the dim `outer`."""

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
        """The part of the leaf within `bounds`; `fetch(name, block)` gives a block of a stored tensor."""
        inner = [bound for dim, bound in enumerate(bounds) if dim != self.outer]

        def one(name: str) -> Tensor:
            return self.transform.read(lambda block: fetch(name, block), self.sizes, inner, self.place)

        if self.outer is None:
            return one(self.names[0])
        parts = [one(name) for name in self.names[slice(*bounds[self.outer])]]
        if parts:
            return torch.stack(parts, self.outer)
        nothing = self.transform.read(lambda block: fetch(self.names[0], block), self.sizes, [(0, 0)] * len(inner), self.place)
        return nothing.new_empty([stop - start for start, stop in bounds])

    def write(self, leaf: Tensor, stored: dict[str, Tensor]) -> None:
        """Put the whole leaf into its tensors in `stored`, which are made if they are not there."""
        for name, part in zip(self.names, [leaf] if self.outer is None else leaf.unbind(self.outer), strict=True):
            if not self.transform.is_part:
                stored[name] = self.transform.write(part, self.sizes)
            else:
                if name not in stored:
                    stored[name] = part.new_empty(self.stored_shape)
                self.transform.write_part(stored[name], part.detach(), self.sizes, self.place)


def map_leaves_to_stored(
    names: Mapping[str, tuple[str, str]], shapes: Mapping[str, tuple[int, ...]], vocab_size: int
) -> dict[str, StoredLeaf]:
    """For the path of each leaf where it is stored; `shapes` are those of leaves, with a vocabulary that may be padded.

    Raises ConfigError for a leaf that the map does not have, and for braces that do not fit the transform.
    """
    keys = {path: re.sub(r"\.\d+\.", ".{i}.", path, count=1) for path in shapes}
    lost = sorted({key for key in keys.values() if key not in names})
    if lost:
        raise ConfigError(f"the weight map has no stored tensor for {', '.join(lost)}")
    found = {path: _stored_leaf(path, shape, *names[keys[path]], vocab_size) for path, shape in shapes.items()}
    rank = {key: i for i, key in enumerate(names)}
    groups: dict[str, list[str]] = {}
    for path in sorted(found, key=lambda path: rank[keys[path]]):
        groups.setdefault(found[path].names[0], []).append(path)
    for paths in groups.values():
        if len(paths) > 1 and not all(found[path].transform.is_part for path in paths):
            raise ConfigError(f"{', '.join(paths)} are all stored in {found[paths[0]].names[0]}: their transforms need a plus")
        for path, place in zip(paths, _places([found[path] for path in paths]), strict=True):
            leaf = found[path]
            found[path] = StoredLeaf(leaf.shape, leaf.names, leaf.outer, leaf.transform, leaf.sizes, place)
    return found


def _stored_leaf(path: str, shape: tuple[int, ...], name: str, text: str, vocab_size: int) -> StoredLeaf:
    index = re.search(r"\.(\d+)\.", path)
    if index is not None:
        name = name.replace("{i}", index[1])
    braces = re.findall(r"\{(\w+)\}", name)
    leaf_names = text.partition("->")[2].split()
    if len(braces) > 1 or any(brace not in leaf_names for brace in braces) or len(leaf_names) != len(shape):
        raise ConfigError(f"cannot store {path} {shape} in {name} by {text!r}: one name in braces, which is a dim of the leaf")
    sizes = dict(zip(leaf_names, shape, strict=True))
    if "v" in sizes:
        sizes["v"] = vocab_size
    if not braces:
        return StoredLeaf(shape, (name,), None, parse_rearrange(text), sizes)
    (brace,) = braces
    inner = " ".join(n for n in leaf_names if n != brace)
    transform = parse_rearrange(f"{text.partition('->')[0]}-> {inner}")
    every = tuple(name.replace(f"{{{brace}}}", str(e)) for e in range(sizes[brace]))
    return StoredLeaf(shape, every, leaf_names.index(brace), transform, sizes)


def _places(leaves: Sequence[StoredLeaf]) -> Iterator[Place]:
    """Where each of the leaves of one stored tensor stands."""
    joined = [leaf.transform.joined for leaf in leaves]
    lengths = [0 if dim is None else leaf.transform.part_shape(leaf.sizes)[dim] for leaf, dim in zip(leaves, joined, strict=True)]
    for i in range(len(leaves)):
        yield Place(i, len(leaves), sum(lengths[:i]), sum(lengths) or None)
