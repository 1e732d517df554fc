"""Trace a segment: one graph for its results and all its gradients. Equal segments are traced once."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Segment
from mpar.compiler.segment._code import TracedSegment
from mpar.compiler.segment._partition import descendants, reaching
from mpar.errors import ConfigError
from mpar.sharding import LogicalGraph, trace
from mpar.tree import Tree
from mpar.user_code import user_code

__all__ = ["trace_segment"]

Shape = tuple[tuple[int, ...], torch.dtype]


def trace_segment(
    segment: Segment,
    params: Sequence[Tree],
    x: Tree,
    context: Mapping[str, Tensor],
    *,
    training: bool,
    differentiable: bool = True,
    num_state: int = 0,
    trained: Sequence[int] | None = None,
    active: Sequence[int] | None = None,
) -> TracedSegment:
    """Trace `segment.fn`, together with its gradients if the program is differentiable.

    num_state: how many leaves at the end of x are the state of the segment.
    trained:   which leaves of the parameters are trained, as indices; None: all.
    active:    which leaves of x depend on a parameter that is trained; None: all. Those that hold integers never count.

    The arguments are trees of tensors without data; `params` has a subtree for each path of the segment. What is trained or
    active gets a gradient, of its own dtype; a segment that has neither is traced without gradients.
    """
    leaves, structure = tree.flatten((tuple(params), () if x is None else x, dict(context)))
    num_params, num_x = len(tree.leaves(tuple(params))), len(tree.leaves(() if x is None else x))
    key = tuple((tuple(t.shape), t.dtype) for t in leaves)
    function, counts = _Function(segment.fn, structure, first=x is None, training=training), (num_params, num_x, num_state)
    chosen = range(num_params) if trained is None else trained
    active_x = tuple(i for i in (range(num_x) if active is None else active) if key[num_params + i][1].is_floating_point)
    if not differentiable or not (chosen or active_x):
        return _trace_forward(function, counts, key)
    return _trace_joint(function, counts, key, tuple(chosen), active_x)


@dataclass(frozen=True)
class _Function:
    """The function of a segment, which takes the leaves of (params, x, context) in one list.

    structure: the structure of (params, x, context).
    first:     whether the segment is the first of the chain: its x is None.
    """

    fn: Callable[..., tuple]
    structure: Any
    first: bool
    training: bool

    def __call__(self, leaves: Sequence[Tensor]) -> "_Results":
        params, x, context = tree.unflatten(self.structure, list(leaves))
        call = f"the segment function {getattr(self.fn, '__qualname__', None) or repr(self.fn)}"
        with user_code(call):
            result = self.fn(params, None if self.first else x, context, training=self.training)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ConfigError(f"{call} returned a {_kind(result)}: return (x, losses), or (x, losses, metrics).")
        x_leaves, structure = tree.flatten(() if result[0] is None else result[0])
        _check_results(call, x_leaves, result[1:])
        return _Results(x_leaves, structure, result[1], result[2] if len(result) > 2 else {})


def _kind(value: object) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _check_results(call: str, x: Sequence[object], others: Sequence[object]) -> None:
    """Raise ConfigError, with all problems, unless x is tensors, and losses and metrics are tensors by name; something must have
    a gradient."""
    strange = [type(leaf).__name__ for leaf in x if not isinstance(leaf, Tensor)]
    problems = [f"x has a {name} among its leaves, which is no tensor" for name in strange]
    for label, named in zip(("losses", "metrics"), others, strict=False):
        if not isinstance(named, Mapping):
            problems.append(f"{label} are a {_kind(named)}, not a dict of tensors by name")
            continue
        wrong = [(name, value) for name, value in named.items() if not isinstance(value, Tensor)]
        problems += [f"{label} has {name!r}, a {type(value).__name__}, which is no tensor" for name, value in wrong]
    if not problems:
        assert isinstance(others[0], Mapping)
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in (*x, *others[0].values())):
            problems.append("it returns neither a floating-point x nor a loss, so that nothing has a gradient")
    if problems:
        raise ConfigError(f"{call} returned what cannot be compiled:\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class _Results:
    """What a segment returns: the leaves and the structure of x, losses and metrics by name."""

    x: list[Tensor]
    structure: Any
    losses: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor]

    @property
    def differentiable(self) -> list[Tensor]:
        """The leaves of x, then the losses in the order of their names."""
        return [*self.x, *(self.losses[name] for name in sorted(self.losses))]

    @property
    def reported(self) -> list[Tensor]:
        """The metrics in the order of their names."""
        return [self.metrics[name] for name in sorted(self.metrics)]


@functools.lru_cache(maxsize=256)
def _trace_joint(
    function: _Function, counts: tuple[int, int, int], key: tuple[Shape, ...], trained: tuple[int, ...], active_x: tuple[int, ...]
) -> TracedSegment:
    """Trace the joint graph: results and gradients.

    counts:            how many leaves the parameters, x and the state at the end of x have.
    key:               the shape and dtype of every leaf of (parameters, x, context).
    trained, active_x: which parameters and leaves of x get a gradient, as indices.

    Only results through which a gradient flows have a cotangent: not one that was detached, although it depends on a parameter.
    """
    forward = _trace_forward(function, counts, key)
    num_params = counts[0]
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in key]
    differentiated = (*trained, *(num_params + i for i in active_x))
    num_results = forward.num_results - len(forward.metrics)
    active = _depending(forward.logical, differentiated, num_results)
    while True:
        cotangents = [torch.empty_like(forward.logical.results[i].meta["val"], device="meta") for i in active]
        joint = functools.partial(_joint, function, differentiated, active)
        logical = trace(joint, (metas, cotangents))
        read = reaching(logical.results[forward.num_results :], set())
        flowing = tuple(i for i, node in zip(active, logical.placeholders[len(key) :], strict=True) if node in read)
        if flowing == active:
            return replace(forward, logical=logical, trained=trained, active_x=active_x, active_out=active)
        active = flowing


def _depending(logical: LogicalGraph, inputs: Sequence[int], num_results: int) -> tuple[int, ...]:
    """Which of the first results hold floating-point numbers and depend on any of these inputs, as indices."""
    found = descendants(logical.graph, {logical.placeholders[i] for i in inputs})
    results = enumerate(logical.results[:num_results])
    return tuple(i for i, node in results if node in found and node.meta["val"].is_floating_point())


@functools.lru_cache(maxsize=256)
def _trace_forward(function: _Function, counts: tuple[int, int, int], key: tuple[Shape, ...]) -> TracedSegment:
    """`_trace_joint` without gradients."""
    num_params, num_x, num_state = counts
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in key]
    calls: list[_Results] = []  # what each call of the function returned while it was traced

    def all_results(leaves: Sequence[Tensor]) -> list[Tensor]:
        calls.append(function(leaves))
        return [*calls[-1].differentiable, *calls[-1].reported]

    logical = trace(all_results, (metas,))
    returned = calls[-1]
    x_out = tuple(torch.empty_like(node.meta["val"], device="meta") for node in logical.results[: len(returned.x)])
    names = tuple(sorted(returned.losses)), tuple(sorted(returned.metrics))
    num_context = len(key) - num_params - num_x
    return TracedSegment(logical, x_out, returned.structure, *names, num_params, num_x, num_context, num_state)


def _joint(
    function: _Function,
    differentiated: Sequence[int],
    active: Sequence[int],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:
    """The results of a segment, then the gradients of those `leaves` of (parameters, x, context) that are `differentiated`.

    active: which results have a cotangent, as indices.
    """

    def some_results(chosen: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        places = dict(zip(differentiated, chosen, strict=True))
        results = function([places.get(i, leaf) for i, leaf in enumerate(leaves)])
        everything = [*results.differentiable, *(metric.detach() for metric in results.reported)]
        return [everything[i] for i in active], everything

    chosen = [leaves[i] for i in differentiated]
    if not active:  # nothing that the segment gives depends on them
        return [*some_results(chosen)[1], *map(torch.zeros_like, chosen)]
    _, pull_back, *aux = torch.func.vjp(some_results, chosen, has_aux=True)
    return [*aux[0], *pull_back(list(cotangents))[0]]
