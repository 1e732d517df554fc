"""QuantisedModel: a model some of whose weights are codes of few bits. In its tree each of them is a small tree of parts."""

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Segment
from mpar.errors import ConfigError
from mpar.models import Matrix, Read, Trainable, WrappedModel
from mpar.ops import NF4_BLOCK
from mpar.quantised._layout import Kind, Layout, Parts, check_kind, layout_of
from mpar.quantised._segment import QuantisedSegment, QuantisedWeight
from mpar.tree import Tree

__all__ = ["ALL_LINEAR", "PartsSource", "QuantisedModel", "quantise"]

ALL_LINEAR = "all-linear"


class PartsSource(ABC):
    """Gives leaves of the plain model, as a `Read` does, and has some weights quantised already."""

    @abstractmethod
    def __call__(self, path: str, slices: Sequence[slice] | None) -> Tensor:
        """The elements within `slices` (None: all) of a leaf of the plain model."""

    @abstractmethod
    def part(self, path: str, slices: Sequence[slice] | None) -> Tensor:
        """The elements within `slices` (None: all) of a part of a quantised weight."""


def quantise(
    model: Trainable, kind: Kind = "nf4", *, targets: str | Sequence[str] = ALL_LINEAR, exclude: Sequence[str] = ()
) -> "QuantisedModel":
    """`model` with quantised weights, which are frozen and are dequantised where a segment uses them.

    kind:    "nf4" or "int8"; see `mpar.ops.quantise_nf4` and `quantise_int8`.
    targets: ends of names of matrices as Hugging Face has them, or "all-linear": all linear layers but the head, and experts, but
             no routers. exclude: ends of names of matrices that stay as they are.

    If `model` freezes some of its weights, only frozen ones are quantised; so adapters are added before. Raises ConfigError, with
    everything that is wrong: names that match nothing, rows that are no whole blocks.
    """
    check_kind(kind)
    if isinstance(model, QuantisedModel):
        raise ConfigError(f"cannot quantise this {model.name} model: it is quantised to {model.kind}")
    wanted = targets if isinstance(targets, str) else tuple(targets)
    made = QuantisedModel(model, kind, wanted, tuple(exclude))
    names = [matrix.name for matrix in model.matrices]
    asked = [*([] if wanted == ALL_LINEAR else [wanted] if isinstance(wanted, str) else wanted), *exclude]
    problems = [f"no matrix is called {end!r}" for end in asked if not any(_ends(name, (end,)) for name in names)]
    layouts = made.layouts
    problems += ["none of its matrices is both a target and frozen"] * (not layouts and not problems)
    problems += [
        f"{path} has rows of {layout.matrix_shape[-1]}, which are no whole blocks of {NF4_BLOCK}; exclude it, or use int8"
        for path, layout in layouts.items()
        if kind == "nf4" and layout.matrix_shape[-1] % NF4_BLOCK
    ]
    if problems:
        ends = sorted({name.rpartition(".")[2] for name in names})
        lines = "\n  ".join(dict.fromkeys(re.sub(r"layers\.\d+", "layers.*", problem) for problem in problems))
        raise ConfigError(f"cannot quantise this {model.name} model:\n  {lines}\nits matrices end with {', '.join(ends)}")
    return made


@dataclass(frozen=True)
class QuantisedModel(WrappedModel):
    """`base` with quantised weights; made by `quantise`, which says what the fields are."""

    base: Trainable
    kind: Kind
    targets: str | tuple[str, ...]
    exclude: tuple[str, ...]

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the quantised leaves, by their path in `base`."""
        shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(self.base.abstract_params)}
        frozen = self.base.frozen
        return {
            leaf.path: layout_of(self.kind, leaf, shapes)
            for matrix in self.base.matrices
            if self._is_target(matrix)
            for leaf in matrix.leaves
            if not frozen or leaf.path in frozen
        }

    def _is_target(self, matrix: Matrix) -> bool:
        if matrix.kind == "embedding" or _ends(matrix.name, self.exclude):
            return False
        if self.targets == ALL_LINEAR:
            of_experts = all(leaf.expert is not None for leaf in matrix.leaves)
            return matrix.kind == "linear" or (matrix.kind == "parameter" and of_experts)
        tied = matrix.segments is not None  # the embedding reads rows of it, which have no product to be dequantised for
        return not tied and _ends(matrix.name, (self.targets,) if isinstance(self.targets, str) else self.targets)

    @functools.cached_property
    def abstract_params(self) -> Tree:  # type: ignore[override]
        """The tree of `base` with the parts of quantised weights in their places; meta tensors."""
        made = self.base.abstract_params
        for path, layout in self.layouts.items():
            made = tree.replace(made, path, layout.meta())
        return made

    @functools.cached_property
    def param_axes(self) -> Tree:  # type: ignore[override]
        """The same tree with the logical axes of each leaf."""
        made = self.base.param_axes
        for path, layout in self.layouts.items():
            made = tree.replace(made, path, layout.axes(tree.get(made, path)))
        return made

    @functools.cached_property
    def frozen(self) -> frozenset[str]:  # type: ignore[override]
        """What `base` freezes, and all parts of quantised weights."""
        parts = {f"{path}.{part}" for path in self.layouts for part in tree.paths(tree.get(self.abstract_params, path))}
        return (self.base.frozen - set(self.layouts)) | parts

    @functools.cached_property
    def stands_for(self) -> dict[str, int]:  # type: ignore[override]
        """The codes of a weight stand for its numbers; its other parts are no parameters."""
        parts = {path: tree.paths(tree.get(self.abstract_params, path)) for path in self.layouts}
        counts = {
            f"{path}.{part}": math.prod(self.layouts[path].shape) if part == "codes" else 0
            for path, found in parts.items()
            for part in found
        }
        return {**self.base.stands_for, **counts}

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:  # type: ignore[override]
        """The segments of `base`, which dequantise what they use."""
        return tuple(map(self._segment, self.base.segments))

    def over(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The segments, which dequantise what they use."""
        return tuple(map(self._segment, self.base.over(segments)))

    def plain_params(self, params: Tree, adapter: int = 0) -> Tree:
        """The parameters of `plain`, in which objects stand for quantised weights."""
        like = self.base.abstract_params
        for path, layout in self.layouts.items():
            weight = QuantisedWeight(tree.get(params, path), layout, tree.get(like, path).dtype)
            params = tree.replace(params, path, weight)
        return self.base.plain_params(params, adapter)

    def _segment(self, segment: Segment) -> Segment:
        weights = tuple(
            (index, path.removeprefix(root).removeprefix("."), layout)
            for index, root in enumerate(segment.paths)
            for path, layout in self.layouts.items()
            if f"{path}.".startswith(f"{root}.")
        )
        if not weights:
            return segment
        carry = segment.carry
        if carry is not None:
            carry = replace(carry, fn=QuantisedSegment(carry.fn, weights))
        return replace(segment, fn=QuantisedSegment(segment.fn, weights), carry=carry)

    @property
    def settings(self) -> dict[str, object]:
        """Those of `base`, and how it is quantised."""
        return {"base": self.base.settings, "quantised": self.kind, "targets": self.targets, "exclude": self.exclude}

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those of `base` that are not quantised."""
        return tuple(matrix for matrix in self.base.matrices if not any(leaf.path in self.layouts for leaf in matrix.leaves))

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` of the first value of a leaf; of a part, that of the whole weight is quantised."""
        return self._leaf_of(path, slices, lambda base_path, cut: self.base.init_leaf(seed, base_path, cut), key=seed)

    def first_leaf(self, seed: int, path: str, slices: Sequence[slice] | None, read: Read) -> Tensor:
        """The elements within `slices` (None: all) of a leaf, quantised, where `read(path, slices)` gives leaves of `plain`."""
        if isinstance(read, PartsSource) and path.rpartition(".")[0] in self.layouts:
            return read.part(path, slices)
        return self._leaf_of(
            path, slices, lambda base_path, cut: self.base.first_leaf(seed, base_path, cut, read), key=(seed, read)
        )

    def _leaf_of(self, path: str, slices: Sequence[slice] | None, read: Read, *, key: object) -> Tensor:
        """The elements within `slices` (None: all) of the leaf at `path`, where `read(path, slices)` gives leaves of `base`.

        A weight is quantised as a whole, because its blocks share a mean magnitude. key: equal for equal leaves of `base`.
        """
        root, _, part = path.rpartition(".")
        if root not in self.layouts:
            return read(path, slices)
        if root not in self._quantised_last or self._quantised_last[root][0] != key:
            self._quantised_last.clear()
            self._quantised_last[root] = key, self.layouts[root].quantise(read(root, None))
        made: Tensor = getattr(self._quantised_last[root][1], part)
        return made if slices is None else made[tuple(slices)].contiguous()

    @functools.cached_property
    def _quantised_last(self) -> dict[str, tuple[object, Parts]]:
        """The weight that was quantised last, with what it was made of: another part of it is often asked for next."""
        return {}

    def base_leaf(self, path: str, read: Callable[[str], Tensor]) -> Tensor:
        """The leaf of `base` at `path`, dequantised, where `read` gives leaves of this model."""
        layout = self.layouts.get(path)
        if layout is None:
            return read(path)
        named, structure = tree.leaves_with_path(layout.meta()), tree.flatten(layout.meta())[1]
        parts = tree.unflatten(structure, [read(f"{path}.{part}") for part, _ in named])
        return layout.dequantise(parts, tree.get(self.base.abstract_params, path).dtype).contiguous()

    def quantise_params(self, params: Tree) -> Tree:
        """The parameters of this model, from those of `base`."""
        for path, layout in self.layouts.items():
            params = tree.replace(params, path, layout.quantise(tree.get(params, path)))
        return params

    def dequantise_params(self, params: Tree, dtype: torch.dtype) -> Tree:
        """The parameters of `base`, in which quantised weights are of `dtype`."""
        for path, layout in self.layouts.items():
            parts: Parts = tree.get(params, path)
            params = tree.replace(params, path, layout.dequantise(parts, dtype).contiguous())
        return params


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)
