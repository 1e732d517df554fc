"""Chain: a model as the compiler sees it: a list of segments that read one parameter tree, and the logical axes of its tensors.

A segment is a pure function `fn(params, x, context, training=...) -> (x, losses[, metrics])`. Equal layers share one `fn` object
and are compiled once.
"""

import difflib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, TypeVar

from torch import Tensor

from mpar import tree
from mpar.errors import ConfigError, brief
from mpar.tree import Tree
from mpar.user_code import user_code

__all__ = [
    "CONTEXT_OF_PAST",
    "HIGHEST",
    "Axes",
    "Carry",
    "Chain",
    "Segment",
    "Update",
    "check_chain",
    "context_of",
    "is_axes",
    "of_past",
    "of_segment",
]

HIGHEST = ".highest"
"""How the names of those metrics of a segment end of which microbatches report the highest, and not the sum."""
Axes = tuple[str | None, ...]
"""Logical names of a tensor's dims, such as `("batch", "residual_seq", "embed")`; None is a dim that is never sharded."""


def is_axes(x: object) -> TypeGuard[Axes]:
    """Whether `x` is a leaf of a tree of logical axes, which is a tuple of names and Nones."""
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


@dataclass(frozen=True)
class Carry:
    """How a segment computes a slice that continues the earlier slices of the same rows.

    fn:    `fn(params, x, context, past, training=...) -> (x, carried, losses[, metrics])`. `carried` is what later slices need
           from this one: a tree of floating-point tensors, or None. `past` is a tuple of what earlier slices carried, oldest
           first. The context also has the entries CONTEXT_OF_PAST of those slices, if they have them, under the keys that
           `of_past` gives.
    axes:  logical axes of the leaves of `carried`.
    reach: how many positions, counting itself, a position reads of what was carried, like the window of windowed attention; None
           means all positions before it. Slices that are out of reach are not in `past`. The state of a scan, which every slice
           replaces by a new one, needs a reach of 2: a position itself and the one before it.
    """

    fn: Callable[..., tuple]
    axes: Any
    reach: int | None = None


CONTEXT_OF_PAST = ("order", "documents")
"""The entries of the context that attention reads for keys as well as for queries: later slices read those of earlier ones."""


def of_past(key: str, index: int) -> str:
    """The key under which the context of a slice has the entry `key` of the earlier slice that carried `past[index]`."""
    return f"{key}.{index}"


def of_segment(key: str, segment: str) -> str:
    """The key of the context whose entry only the segment of this name reads, as `key`.

    Equal segments are one program. What differs between them, and is no parameter, they read so.
    """
    return f"{key}@{segment}"


Entry = TypeVar("Entry")


def context_of(segment: str, context: Mapping[str, Entry]) -> dict[str, Entry]:
    """What the segment of this name reads of a context: its own entries, see `of_segment`, and those of no segment, in order."""
    parted = ((*key.partition("@"), entry) for key, entry in context.items())
    return {key: entry for key, mark, name, entry in parted if not mark or name == segment}


@dataclass(frozen=True)
class Segment:
    """One function of the chain.

    fn:        `fn(params, x, context, training=...) -> (x, losses)`; `params` is a tuple of the subtrees at `paths`; `x` is what
               the previous segment returned (the first gets None); `losses` maps a name to a scalar that training minimises.
               "loss" is the sum over tokens; others are side losses, reported under their names. Every loss of every segment is
               divided by the chain's weight of the whole batch. So a side loss that is a mean must be multiplied by the weight of
               the batch that this call was given. An optional third result maps names to tensors, metrics, which are added over
               microbatches and reported; of one whose name ends with HIGHEST the highest is reported. `training` is a bool:
               True in training, False in evaluation, where the outputs of a token should not depend on which others are in its
               batch. `fn` must be hashable: segments with equal `fn` and
               shapes share one kind.
    paths:     where the parameters of the segment are in the tree: `("layers.3",)`, or `("head", "embed.table_VD")` for a head
               that is tied to the embedding.
    out_axes:  logical axes of the leaves of the `x` that `fn` returns.
    carry:     what a slice of the rows carries to later ones; None: no position depends on another position of its row.
    state:     where its state is in the tree of the chain's state: tensors that the program keeps from step to step, such as a
               cache of keys. `fn` is then called as `fn(params, x, context, state, training=...)`, where `state` is a tuple of
               the subtrees at these paths, and returns `(x, state, losses[, metrics])`, with the state that the next step gets.
    """

    name: str
    fn: Callable[..., tuple]
    paths: tuple[str, ...]
    out_axes: Any = field(default=None)
    carry: Carry | None = None
    state: tuple[str, ...] = ()


Update = tuple[str, Callable[[Tensor, Tensor], Tensor]]
"""How a parameter without a gradient is updated: the name of a metric, and `fn(parameter, metric)`, which gives the new value."""


class Chain(Protocol):
    """What the compiler needs from a model. A subclass defines the abstract members and inherits those that have a default."""

    @property
    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """The functions of the chain, first to last; the last returns `(None, {"loss": loss_sum, ...})`.

        In a chain for `compile_forward` it returns `(x, {})`, and the leaves of this x are the results of the program.
        """

    @property
    @abstractmethod
    def abstract_params(self) -> Tree:
        """The parameter tree with meta tensors as leaves, in their global (padded) shapes."""

    @property
    @abstractmethod
    def param_axes(self) -> Tree:
        """The same tree with an `Axes` tuple for each leaf."""

    @property
    @abstractmethod
    def batch_axes(self) -> dict[str, Axes]:
        """Every batch key that the model reads, with its logical axes."""

    @abstractmethod
    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> Mapping[str, Tensor]:
        """What every segment may read (tokens, labels, RoPE tables, documents); nothing in it is differentiated.

        An entry under the key `of_segment(key, name)` is read by the segment of this name only, as `key`.

        `row_length` is given if the batch is only a slice: it is the number of positions of the full rows.
        """

    @abstractmethod
    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The scalar that the loss sum of this batch is divided by, a function of the batch alone."""

    @property
    def abstract_state(self) -> Tree:
        """What the program keeps from step to step besides parameters, with meta tensors as leaves; by default nothing."""
        return {}

    @property
    def state_axes(self) -> Tree:
        """The same tree with an `Axes` tuple for each leaf."""
        return {}

    @property
    def updates(self) -> Mapping[str, Update]:
        """Parameters that are not updated by a gradient, by path. A step sets each to `fn(parameter, metric)`, where the metric
        is called `<segment>.<name>`. `fn` must be hashable. By default there are none."""
        return {}

    @property
    def frozen(self) -> frozenset[str]:
        """Paths of the parameters that training does not change: they have no gradient and no state of an optimizer, and no entry
        in `updates` changes them. By default there are none."""
        return frozenset()

    @property
    def stands_for(self) -> Mapping[str, int]:
        """By path, how many parameters a leaf stands for, where that is not the number of its elements: codes of several, or what
        codes are multiplied by, which is none. By default there are no such leaves."""
        return {}

    @property
    def forbids_microbatches(self) -> str | None:
        """Why the batch of a step cannot be cut into microbatches; None, the default, if it can."""
        return None

    @property
    def forbids_slices(self) -> str | None:
        """Why rows cannot be cut into slices; None if they can. By default they cannot."""
        return "it does not say what its segments carry from one slice to the next (forbids_slices)."


_MEMBERS = (
    "segments",
    "abstract_params",
    "param_axes",
    "batch_axes",
    "context",
    "weight",
    "abstract_state",
    "state_axes",
    "updates",
    "frozen",
    "stands_for",
    "forbids_microbatches",
    "forbids_slices",
)


def check_chain(chain: Chain, *, trains: bool = False) -> None:
    """Raise ConfigError, listing every problem by segment and leaf, unless the members of a chain fit each other.

    trains: whether the chain is to be trained, so that not all of its parameters may be frozen.

    Its functions are not traced here: what only that shows, such as the leaves that a segment returns, is checked at compilation.
    """
    with user_code(f"making the members of {type(chain).__name__}"):
        problems = [f"it lacks `{name}`: {_meaning(name)}" for name in _MEMBERS if not hasattr(chain, name)]
    problems = problems or [*_member_problems(chain)]
    if not problems:
        problems = [*_axes_problems(chain), *_segment_problems(chain), *_frozen_problems(chain, trains=trains)]
        problems += _state_problems(chain)
    if problems:
        raise ConfigError(f"cannot compile {type(chain).__name__} as a chain of segments:\n  " + "\n  ".join(problems))


def _member_problems(chain: Chain) -> Iterator[str]:
    """Members of other types than they must be."""
    segments, batch_axes = chain.segments, chain.batch_axes
    if not isinstance(segments, (tuple, list)) or not segments or not all(isinstance(item, Segment) for item in segments):
        yield f"`segments` is {brief(segments)}: it must be a tuple of mpar.chain.Segment"
    if not isinstance(chain.frozen, frozenset):
        yield f"`frozen` is {brief(chain.frozen)}: it must be a frozenset of paths"
    if not isinstance(batch_axes, Mapping):
        yield f"`batch_axes` is {brief(batch_axes)}: it must be a dict from batch keys to the names of their dims"
    wrong = [path for path, leaf in tree.leaves_with_path(chain.abstract_params) if not isinstance(leaf, Tensor)]
    if wrong:
        yield f"`abstract_params` has no tensors at {', '.join(wrong[:4])}: use torch.empty(shape, device='meta')"


def _meaning(name: str) -> str:
    """The first sentence of the docstring that `Chain` has for a member."""
    return " ".join((getattr(Chain, name).__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _axes_problems(chain: Chain) -> list[str]:
    """Parameters without axes, axes without a parameter or with a wrong number of names, and batch keys without valid axes."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(chain.abstract_params)}
    axes = dict(tree.leaves_with_path(chain.param_axes, is_leaf=is_axes))
    problems = [f"parameter {path} {shape} has no axes in param_axes" for path, shape in shapes.items() if path not in axes]
    problems += [f"param_axes has {path}, which is no parameter{_near(path, shapes)}" for path in axes if path not in shapes]
    problems += [
        f"parameter {path} {shape} has {len(shape)} dims, but its axes {axes[path]} name {len(axes[path])}"
        for path, shape in shapes.items()
        if path in axes and len(axes[path]) != len(shape)
    ]
    return problems + [
        f"batch key {key!r} has axes {names!r}, which must be a tuple of names and Nones"
        for key, names in chain.batch_axes.items()
        if not is_axes(names)
    ]


def _segment_problems(chain: Chain) -> list[str]:
    """Segments with the same name, segments and updates with paths that do not exist, and parameters that no segment reads."""
    paths = tree.paths(chain.abstract_params)
    subtrees = {".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 2)}
    names = [segment.name for segment in chain.segments]
    problems = [f"several segments are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
    for segment in chain.segments:
        problems += [
            f"segment {segment.name!r} reads {path!r}, where there is no parameter{_near(path, subtrees)}"
            for path in segment.paths
            if path not in subtrees
        ]
    read = {path for segment in chain.segments for path in segment.paths}
    idle = [path for path in paths if not any(f"{path}.".startswith(f"{prefix}.") for prefix in read)]
    problems += [f"no segment reads the parameter {path}: it would be neither trained nor saved" for path in idle]
    return problems + [
        f"updates has {path!r}, which is no parameter{_near(path, paths)}" for path in chain.updates if path not in paths
    ]


def _frozen_problems(chain: Chain, *, trains: bool) -> Iterator[str]:
    """Frozen paths that are no parameters, integers that are not frozen, and a chain to train that has nothing to train."""
    leaves = dict(tree.leaves_with_path(chain.abstract_params))
    for path in sorted(chain.frozen - set(leaves)):
        inside = sum(leaf.startswith(f"{path}.") for leaf in leaves)
        hint = f", but a tree with {inside} of them; name these" if inside else _near(path, leaves)
        yield f"frozen has {path!r}, which is no parameter{hint}"
    for path, leaf in leaves.items():
        if not leaf.is_floating_point() and path not in (*chain.frozen, *chain.updates):
            yield f"parameter {path} holds {leaf.dtype}, which has no gradient: it must be in frozen, or in updates"
    if trains and not set(leaves) - chain.frozen - set(chain.updates):
        yield f"all of its {len(leaves)} parameters are frozen, so that there is nothing to train"


def _state_problems(chain: Chain) -> Iterator[str]:
    """State without fitting axes, paths of segments where there is no state, and state that not exactly one segment replaces."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(chain.abstract_state)}
    axes = dict(tree.leaves_with_path(chain.state_axes, is_leaf=is_axes))
    for path in dict.fromkeys((*shapes, *axes)):
        if path not in shapes or path not in axes or len(shapes[path]) != len(axes[path]):
            yield f"state {path} {shapes.get(path, 'is not in abstract_state')} has the axes {axes.get(path)} in state_axes"
    holders: dict[str, list[str]] = {path: [] for path in shapes}
    for segment in chain.segments:
        for place in segment.state:
            inside = [path for path in shapes if f"{path}.".startswith(f"{place}.")]
            if not inside:
                yield f"segment {segment.name!r} keeps state at {place!r}, where there is none{_near(place, shapes)}"
            for path in inside:
                holders[path].append(segment.name)
    for path, names in holders.items():
        if len(names) != 1:
            yield f"state {path} is replaced by the segments {names}: it must be exactly one"


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {matches[0]!r}?" if matches else ""
