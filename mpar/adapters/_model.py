"""AdaptedModel: a model with adapters. Its tree of parameters is that of the model with one more entry, `adapters`."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.adapters._first import first_leaf
from mpar.adapters._leaves import ADAPTERS, AdapterLeaf, adapter_leaves, letters_of, nested
from mpar.adapters._lora import LoRA
from mpar.adapters._segment import AdaptedSegment, Place, Use, letters_of_use, low_rank
from mpar.adapters._start import start_leaf
from mpar.adapters._targets import Adapted, adapted_matrices, saved_leaves
from mpar.chain import Axes, Segment, is_axes
from mpar.errors import ConfigError, UnknownNameError
from mpar.models import DRAW, DRAW_AXES, Matrix, Multiplications, Read, Trainable, WrappedModel, segment_numbers
from mpar.tree import Tree

__all__ = ["AdaptedModel", "add", "base_params", "first_params", "with_adapters"]


def add(model: Trainable, lora: LoRA, name: str = "default") -> "AdaptedModel":
    """`model` with one more adapter, called `name`; all its adapters are active, and added up.

    Raises ConfigError for targets that the model does not have, see `LoRA`, and for a name that is taken.
    """
    base, adapters = (model.base, model.adapters) if isinstance(model, AdaptedModel) else (model, ())
    taken = [other for other, _ in adapters]
    if not name.isidentifier() or name in taken:
        raise ConfigError(f"cannot call an adapter {name!r}: it must be an identifier, and not one of {taken}")
    active = (*(model.active if isinstance(model, AdaptedModel) else ()), name)
    made = AdaptedModel(base, (*adapters, (name, lora)), active)
    adapted_matrices(base, lora)
    saved_leaves(base, lora)
    return made


@dataclass(frozen=True)
class AdaptedModel(WrappedModel):
    """A model with adapters. Only those parameters are trained that belong to active adapters, or that these train in full.

    active: the names of the adapters that are added to the weights. Without any it computes what `base` computes.
    """

    base: Trainable
    adapters: tuple[tuple[str, LoRA], ...]
    active: tuple[str, ...]

    def with_active(self, *names: str) -> "AdaptedModel":
        """The same model and parameters with these adapters active, and no others. Raises UnknownNameError."""
        known = [name for name, _ in self.adapters]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UnknownNameError(f"no adapters are called {unknown}; there are {known}")
        return replace(self, active=names)

    @functools.cached_property
    def adapted(self) -> dict[str, tuple[Adapted, ...]]:
        """By the name of each adapter, the matrices that have it."""
        return {name: adapted_matrices(self.base, lora) for name, lora in self.adapters}

    @functools.cached_property
    def leaves(self) -> dict[str, AdapterLeaf]:
        """The leaves of all adapters by path."""
        shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(self.base.abstract_params)}
        axes = dict(tree.leaves_with_path(self.base.param_axes, is_leaf=is_axes))
        loras = dict(self.adapters)
        found = [
            leaf
            for name, matrices in self.adapted.items()
            for adapted in matrices
            for leaf in adapter_leaves(name, adapted, shapes, axes, dora=loras[name].dora)
        ]
        return {leaf.path: leaf for leaf in found}

    @functools.cached_property
    def abstract_params(self) -> Tree:  # type: ignore[override]
        """The tree of `base`, and the entry `adapters`; meta tensors."""
        base = self.base.abstract_params
        dtypes = {path: leaf.dtype for path, leaf in tree.leaves_with_path(base)}
        made = {
            path: torch.empty(leaf.shape, dtype=_wide(dtypes[leaf.leaf.path]), device="meta")
            for path, leaf in self.leaves.items()
        }
        return with_adapters(base, made)

    @functools.cached_property
    def param_axes(self) -> Tree:  # type: ignore[override]
        """The same tree with the logical axes of each leaf."""
        return with_adapters(self.base.param_axes, {path: leaf.axes for path, leaf in self.leaves.items()})

    @functools.cached_property
    def frozen(self) -> frozenset[str]:  # type: ignore[override]
        """All parameters of `base` but those that an active adapter trains in full, and all adapters that are not active."""
        paths, loras = tree.paths(self.base.abstract_params), dict(self.adapters)
        trained = {path for name in self.active for path in (*saved_leaves(self.base, loras[name]), *self.trained_biases(name))}
        others = [path for path in self.leaves if path.split(".")[1] not in self.active]
        return frozenset(path for path in paths if path not in trained) | frozenset(others)

    def trained_biases(self, name: str) -> tuple[str, ...]:
        """The paths of the biases that an adapter trains."""
        how = dict(self.adapters)[name].bias
        biases = [path for path in tree.paths(self.base.abstract_params) if "bias" in path.rpartition(".")[2]]
        if how == "none":
            return ()
        near = {_without_dims(leaf.path) for adapted in self.adapted[name] for leaf in adapted.matrix.leaves}
        return tuple(path for path in biases if how == "all" or _of_bias(path) in near)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:  # type: ignore[override]
        """The segments of `base` with adapted weights."""
        return tuple(self._segment(segment) for segment in self.base.segments)

    def over(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The segments with adapted weights."""
        return tuple(self._segment(segment) for segment in self.base.over(segments))

    def plain_params(self, params: Tree, adapter: int = 0) -> Tree:
        """The parameters of `plain`, in which objects stand for adapted weights. Raises ConfigError as `check_untied`."""
        self.check_untied()
        made, loras = base_params(self, params), dict(self.adapters)
        for name in self.active:
            for adapted in self.adapted[name]:
                for leaf in adapted.matrix.leaves:
                    weight = tree.get(made, leaf.path)
                    low = low_rank(weight, name, adapted, leaf, lambda path: tree.get(params, path), dora=loras[name].dora)
                    made = tree.replace(made, leaf.path, low)
        return self.base.plain_params(made, adapter)

    def _segment(self, segment: Segment) -> Segment:
        paths = list(segment.paths)
        uses: list[Use] = []
        for name, lora in self.adapters:
            for adapted in self.adapted[name]:
                uses += self._uses(segment, adapted, name, lora, paths) if _reads(segment, adapted.matrix) else ()
        if not uses:
            return segment
        active = tuple(use for use in uses if use.label.partition(".")[0] in self.active)
        fn = AdaptedSegment(segment.fn, len(segment.paths), active)
        carry = segment.carry
        if carry is not None:
            carry = replace(carry, fn=AdaptedSegment(carry.fn, len(segment.paths), active))
        return replace(segment, fn=fn, paths=tuple(paths), carry=carry)

    def _uses(self, segment: Segment, adapted: Adapted, name: str, lora: LoRA, paths: list[str]) -> Iterator[Use]:
        """The uses of an adapter in a segment; the subtrees that it needs are added to `paths`."""
        first: Place | None = None
        for leaf in adapted.matrix.leaves:
            weight = _place(segment.paths, leaf.path)
            if weight is None:
                continue
            root = f"{ADAPTERS}.{name}.{leaf.home}"
            subtree = root if leaf.home != leaf.path else f"{ADAPTERS}.{name}.{segment.paths[weight[0]]}"
            if subtree not in paths:
                paths.append(subtree)
            index, inside = paths.index(subtree), root.removeprefix(subtree).removeprefix(".")
            inside = f"{inside}." if inside else ""
            first = first or (index, f"{inside}a")
            expert = () if leaf.expert is None else (leaf.expert,)
            letters = letters_of_use(letters_of(leaf), expert, leaf.letters("given"), leaf.letters("result"))
            rate = lora.dropout if adapted.matrix.kind != "embedding" else 0.0
            magnitude = (index, f"{inside}magnitude") if lora.dora else None
            label = f"{name}.{first[1].removesuffix('.a')}"  # the leaves of one matrix drop the same
            gate = self.gate_of(adapted.matrix)
            yield Use(weight, first, (index, f"{inside}b"), magnitude, letters, adapted.scale, rate, label, gate)

    def gate_of(self, matrix: Matrix) -> str | None:
        """The key of the context with the gate of a matrix's adapter; None: all tokens have the adapter."""
        return None

    @property
    def not_only_multiplied(self) -> frozenset[str]:
        """Besides those of `base` the matrices with DoRA, whose norms it computes."""
        by_norm = [adapted for name, lora in self.adapters if lora.dora for adapted in self.adapted[name]]
        return self.base.not_only_multiplied | {leaf.path for adapted in by_norm for leaf in adapted.matrix.leaves}

    @property
    def drops(self) -> bool:
        """Whether an active adapter has dropout."""
        return any(lora.dropout > 0 for name, lora in self.adapters if name in self.active)

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The keys of `base`, and `draw` if something is dropped."""
        return {**self.base.batch_axes, **({DRAW: DRAW_AXES} if self.drops else {})}

    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> Mapping[str, Tensor]:
        """The context of `base`, and what dropout reads."""
        draws = {key: value for key, value in batch.items() if key == DRAW and DRAW not in self.base.batch_axes}
        found = self.base.context({key: value for key, value in batch.items() if key not in draws}, row_length)
        if not draws:
            return found
        return {**found, **draws, **segment_numbers([segment.name for segment in self.base.segments], draws[DRAW])}

    @property
    def settings(self) -> dict[str, object]:
        """Those of `base`, and all of the adapters that says what they compute."""
        return {
            "base": self.base.settings,
            "active": self.active,
            **{name: dataclasses.asdict(lora) for name, lora in self.adapters},
        }

    @property
    def multiplications(self) -> Multiplications:
        """Those of `base`, and of its tokens with A and B of active adapters, for as many experts as those of `base`."""
        found, shapes = self.base.multiplications, dict(tree.leaves_with_path(self.base.abstract_params))
        made = {
            path: math.prod(leaf.shape) * found.weights.get(leaf.leaf.path, 0.0) / shapes[leaf.leaf.path].numel()
            for path, leaf in self.leaves.items()
            if len(leaf.shape) > 1 and path.split(".")[1] in self.active
        }
        return Multiplications({**found.weights, **made}, found.pairs)

    @property
    def tied(self) -> tuple[str, ...]:
        """The names of the matrices with an active adapter that are one of two tied ones, both of which a sum would change."""
        matrices = (adapted.matrix for name in self.active for adapted in self.adapted[name])
        return tuple(matrix.name for matrix in matrices if matrix.segments is not None)

    def check_untied(self) -> None:
        """Raise ConfigError if an adapter cannot be added to the weights."""
        if self.tied:
            raise ConfigError(
                f"cannot merge the adapter of {', '.join(self.tied)}: embedding and head of this {self.name} model are one "
                "tensor, and only one of them has the adapter.\n"
                "Keep the adapter as a folder of its own, or leave this module out of targets."
            )

    def first_leaf(self, seed: int, path: str, slices: Sequence[slice] | None, read: Read) -> Tensor:
        """The elements within `slices` (None: all) of a leaf before training, where `read` gives leaves of `plain`."""
        return self.leaf_of(seed, path, slices, lambda base_path, cut: self.base.first_leaf(seed, base_path, cut, read))

    def leaf_of(self, seed: int, path: str, slices: Sequence[slice] | None, read: Read) -> Tensor:
        """The same, where `read` gives leaves of `base`."""

        def init(path: str, slices: Sequence[slice] | None) -> Tensor:
            return self.init_leaf(seed, path, slices)

        return first_leaf(dict(self.adapters), self.adapted, self.leaves, init, path, slices, read)

    def init_leaf(self, seed: int, path: str, slices: Sequence[slice] | None = None) -> Tensor:
        """The elements within `slices` of the first value of a leaf, where no adapter begins with values of `base`."""
        if path not in self.leaves:
            return self.base.init_leaf(seed, path, slices)
        lora = dict(self.adapters)[path.split(".")[1]]
        leaf = tree.get(self.abstract_params, path)
        return start_leaf(lora, self.leaves[path], leaf.dtype, seed, slices)


def base_params(model: AdaptedModel, params: Tree) -> Tree:
    """The parameters of `model.base` in those of `model`, without any adapter."""
    like = model.base.abstract_params
    return tree.unflatten(tree.flatten(like)[1], [tree.get(params, path) for path in tree.paths(like)])


def first_params(model: AdaptedModel, base: Tree, seed: int) -> Tree:
    """The parameters with which training of the adapters begins, from those of `model.base`."""

    def read(path: str, slices: Sequence[slice] | None) -> Tensor:
        leaf: Tensor = tree.get(base, path)
        return leaf if slices is None else leaf[tuple(slices)]

    structure = tree.flatten(model.abstract_params)[1]
    return tree.unflatten(structure, [model.leaf_of(seed, path, None, read) for path in tree.paths(model.abstract_params)])


def with_adapters(base: Tree, leaves: Mapping[str, object]) -> dict[str, object]:
    """The tree of a model with the leaves of adapters, which are given by path."""
    made: Any = nested(leaves)
    if isinstance(base, Mapping):
        root = dict(base)
    elif dataclasses.is_dataclass(base) and not isinstance(base, type):
        items = ((item.name, getattr(base, item.name)) for item in dataclasses.fields(base))
        root = {name: value for name, value in items if value is not None}
    else:
        assert isinstance(base, (tuple, list)), f"{type(base).__name__} is no tree"
        root = {str(index): value for index, value in enumerate(base)}
    return {**root, **made}


def _reads(segment: Segment, matrix: Matrix) -> bool:
    return matrix.segments is None or segment.name in matrix.segments


def _place(paths: Sequence[str], path: str) -> Place | None:
    """Where the leaf at `path` is among these subtrees."""
    found = [(index, root) for index, root in enumerate(paths) if f"{path}.".startswith(f"{root}.")]
    return None if not found else (found[0][0], path.removeprefix(found[0][1]).removeprefix("."))


def _without_dims(path: str) -> str:
    """`layers.0.attention.q` for `layers.0.attention.q_DNH`."""
    root, _, field = path.rpartition(".")
    name, _, dims = field.rpartition("_")
    return f"{root}.{name if dims.isupper() and name else field}"


def _of_bias(path: str) -> str:
    """The name of the weight to which a bias belongs."""
    return _without_dims(path).replace("_bias", "").replace(".bias", ".weight")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an adapter of a weight of `dtype`: float32 for narrower ones, as in PEFT."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32
