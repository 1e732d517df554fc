"""Chain: what a model is to the compiler. A list of segments over one parameter tree, and the logical axes of its values.

A segment is a pure function `fn(params, x, context) -> (x, losses[, metrics])`. Equal layers share one `fn` object and are
compiled once. A chain may have a property `updates`, parameter path -> (metric, fn): these parameters follow no gradient, a step
sets them to `fn(parameter, metric)`. The metric is named `<segment>.<name>`; `fn` must be hashable.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from mpar.tree import Tree

__all__ = ["CONTEXT_OF_PAST", "Axes", "Carry", "Chain", "Segment", "is_axes", "of_past"]

Axes = tuple[str | None, ...]
"""Logical names of a tensor's dims, such as `("batch", "residual_seq", "embed")`; None is a dim that is never sharded."""


def is_axes(x: object) -> TypeGuard[Axes]:
    """Whether `x` is the leaf of a tree of logical axes: a tuple of names and Nones."""
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


@dataclass(frozen=True)
class Carry:
    """How a segment goes on where an earlier slice of the same rows ended.

    fn:    `fn(params, x, context, past) -> (x, left, losses[, metrics])`. left is what later slices need of this one, a tree of
           floating tensors, or None; `past` is a tuple of what earlier ones left, oldest first. Of these the context has
           CONTEXT_OF_PAST too, as far as it has them, under the keys that `of_past` gives.
    axes:  logical axes of the leaves of left.
    reach: of how many positions a position reads what is left, itself among them, as of a window; None: of all before it.
           Slices out of reach are not in `past`. 2 is enough for a state, which every slice leaves anew.
    """

    fn: Callable[[tuple, Any, Any, tuple], tuple]
    axes: Any
    reach: int | None = None


CONTEXT_OF_PAST = ("order", "documents")
"""The entries of the context that are of keys as well as of queries, so that later slices read them too."""


def of_past(key: str, index: int) -> str:
    """Under which key the context of a slice has the entry `key` of the slice that left `past[index]`."""
    return f"{key}.{index}"


@dataclass(frozen=True)
class Segment:
    """One function of the chain.

    fn:        `fn(params, x, context) -> (x, losses)`; `params` is a tuple of the subtrees at `paths`; `x` is what the segment
               before gave (the first gets None); `losses` maps a name to a scalar that training minimises ("loss" is the sum
               over tokens; others are side losses, reported under their names). A third result maps names to tensors that are
               added over microbatches and reported. It must be hashable: segments with equal `fn` and shapes are one kind.
    paths:     where its parameters are in the tree: `("layers.3",)`, or `("head", "embed.table_VD")` for a tied head.
    out_axes:  logical axes of the leaves of the `x` that it returns.
    carry:     how it goes from slice to slice of its rows; None: its positions see nothing of each other.
    """

    name: str
    fn: Callable[[tuple, Any, Any], tuple]
    paths: tuple[str, ...]
    out_axes: Any = field(default=None)
    carry: Carry | None = None


class Chain(Protocol):
    """What `compile_step` asks of a model.

    Two properties are optional: `whole_step` says why a step must be one microbatch, `whole_rows` why rows cannot be cut into
    slices; None where nothing speaks against it. Without `whole_rows` they cannot. Where they are, `context` is called with
    `row_length=`, the positions of a whole row, besides.
    """

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The functions of the chain, first to last; the last returns `(None, {"loss": loss_sum, ...})`."""

    @property
    def abstract_params(self) -> Tree:
        """The parameter tree with meta tensors of global (padded) shapes."""

    @property
    def param_axes(self) -> Tree:
        """The same tree with an `Axes` tuple for each leaf."""

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """Every batch key that the model reads, with its logical axes."""

    def context(self, batch: dict[str, Tensor]) -> Any:
        """What every segment may read (tokens, labels, RoPE tables, documents); nothing in it is differentiated."""

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The scalar that the loss sum of this batch is divided by, a function of the batch alone."""
