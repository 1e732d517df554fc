"""Chain: what a model is to the compiler. A list of segments over one parameter tree, and the logical axes of its values.

A segment is a pure function `fn(params, x, context, training=...) -> (x, losses[, metrics])`. Equal layers share one `fn` object
and are compiled once.
"""

import difflib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from mpar import tree
from mpar.errors import ConfigError
from mpar.tree import Tree

__all__ = ["CONTEXT_OF_PAST", "Axes", "Carry", "Chain", "Segment", "Update", "check_chain", "is_axes", "of_past"]

Axes = tuple[str | None, ...]
"""Logical names of a tensor's dims, such as `("batch", "residual_seq", "embed")`; None is a dim that is never sharded."""


def is_axes(x: object) -> TypeGuard[Axes]:
    """Whether `x` is the leaf of a tree of logical axes: a tuple of names and Nones."""
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


@dataclass(frozen=True)
class Carry:
    """How a segment goes on where an earlier slice of the same rows ended.

    fn:    `fn(params, x, context, past, training=...) -> (x, carried, losses[, metrics])`. carried is a tree of floating tensors,
           or None: what later slices need of this one. `past` is a tuple of what earlier slices carried over, oldest first. The
           context has the entries CONTEXT_OF_PAST of those slices too, where they have them, under the keys that `of_past` gives.
    axes:  logical axes of the leaves of carried.
    reach: how many positions back a position reads what was carried over, counting itself, as with a window of attention; None
           means all positions before it. Slices out of reach are not in `past`. A state, which every slice makes anew, needs 2.
    """

    fn: Callable[..., tuple]
    axes: Any
    reach: int | None = None


CONTEXT_OF_PAST = ("order", "documents")
"""The entries of the context that are of keys as well as of queries, so that later slices read them too."""


def of_past(key: str, index: int) -> str:
    """Under which key the context of a slice has the entry `key` of the slice that carried over `past[index]`."""
    return f"{key}.{index}"


@dataclass(frozen=True)
class Segment:
    """One function of the chain.

    fn:        `fn(params, x, context, training=...) -> (x, losses)`; `params` is a tuple of the subtrees at `paths`; `x` is what
               the segment before gave (the first gets None); `losses` maps a name to a scalar that training minimises. "loss" is
               the sum over tokens; others are side losses, reported under their names. All of them, of every segment, are
               multiplied by one over the chain's weight of the whole batch: a side loss that is a mean must be multiplied by the
               weight of its own batch. A third result maps names to tensors that are added over microbatches and reported.
               `training` is a bool: whether the pass trains; where it evaluates, a token should not depend on others of its
               batch. It must be hashable: segments with equal `fn` and shapes are one kind.
    paths:     where its parameters are in the tree: `("layers.3",)`, or `("head", "embed.table_VD")` for a tied head.
    out_axes:  logical axes of the leaves of the `x` that it returns.
    carry:     how it goes from slice to slice of its rows; None: its positions see nothing of each other.
    """

    name: str
    fn: Callable[..., tuple]
    paths: tuple[str, ...]
    out_axes: Any = field(default=None)
    carry: Carry | None = None


Update = tuple[str, Callable[[Tensor, Tensor], Tensor]]
"""How a parameter without gradient changes: the name of a metric, and `fn(parameter, metric)`, which gives its new value."""


class Chain(Protocol):
    """What `compile_step` asks of a model. A subclass says the abstract members, and inherits those that have a default."""

    @property
    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """The functions of the chain, first to last; the last returns `(None, {"loss": loss_sum, ...})`."""

    @property
    @abstractmethod
    def abstract_params(self) -> Tree:
        """The parameter tree with meta tensors of global (padded) shapes."""

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

        `row_length` is given where the batch is a slice of rows of so many positions.
        """

    @abstractmethod
    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The scalar that the loss sum of this batch is divided by, a function of the batch alone."""

    @property
    def updates(self) -> Mapping[str, Update]:
        """Parameters that follow no gradient, by path: a step sets each to `fn(parameter, metric)`, of a metric that is named
        `<segment>.<name>`; `fn` must be hashable. By default there are none."""
        return {}

    @property
    def forbids_microbatches(self) -> str | None:
        """Why a step must be one microbatch; None, the default, where nothing speaks against several."""
        return None

    @property
    def forbids_slices(self) -> str | None:
        """Why rows cannot be cut into slices; None where nothing speaks against it. By default they cannot."""
        return "it does not say what its segments carry from one slice to the next (forbids_slices)."


_MEMBERS = (
    "segments",
    "abstract_params",
    "param_axes",
    "batch_axes",
    "context",
    "weight",
    "updates",
    "forbids_microbatches",
    "forbids_slices",
)


def check_chain(chain: Chain) -> None:
    """Raise ConfigError, listing every problem by segment and leaf, unless the parts of a chain fit each other.

    What only a trace of its functions shows, such as the leaves that a segment returns, is checked when it is compiled.
    """
    problems = [f"it lacks `{name}`: {_meaning(name)}" for name in _MEMBERS if not hasattr(chain, name)]
    if not problems:
        problems = [*_axes_problems(chain), *_segment_problems(chain)]
    if problems:
        raise ConfigError(f"cannot compile {type(chain).__name__} as a chain of segments:\n  " + "\n  ".join(problems))


def _meaning(name: str) -> str:
    """The first sentence of what the protocol says of a member."""
    return " ".join((getattr(Chain, name).__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _axes_problems(chain: Chain) -> list[str]:
    """Parameters without axes or with axes of another rank, and batch keys whose axes are none."""
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(chain.abstract_params)}
    axes = dict(tree.leaves_with_path(chain.param_axes, is_leaf=is_axes))
    problems = [f"parameter {path} {shape} has no axes in param_axes" for path, shape in shapes.items() if path not in axes]
    problems += [f"param_axes has {path}, which is no parameter{_near(path, shapes)}" for path in axes if path not in shapes]
    problems += [
        f"parameter {path} {shape} has {len(shape)} dims, its axes {axes[path]} are {len(axes[path])}"
        for path, shape in shapes.items()
        if path in axes and len(axes[path]) != len(shape)
    ]
    return problems + [
        f"batch key {key!r} has axes {names!r}, which must be a tuple of names and Nones"
        for key, names in chain.batch_axes.items()
        if not is_axes(names)
    ]


def _segment_problems(chain: Chain) -> list[str]:
    """Segments without a name of their own or with paths that are none, parameters that none reads, updates of no parameter."""
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


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {found[0]!r}?" if found else ""
