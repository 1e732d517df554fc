"""Segments: every function of the chain, traced once per kind, lowered for the mesh, cut into forward and backward."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.chain import Segment
from mpar.errors import ProgramError
from mpar.kernels import KERNELS, Kernels
from mpar.mesh import Mesh
from mpar.ops import widen
from mpar.program._codegen import generate, positions_of
from mpar.program._fuse import fuse
from mpar.program._kernels import choose_kernels
from mpar.program._memory import measure
from mpar.program._partition import Halves, RecomputePolicy, extract, partition
from mpar.program._program import CollectiveUse, Kind
from mpar.program._reuse import reuse_operands
from mpar.sharding import (
    LogicalGraph,
    RankGraph,
    bucket,
    check,
    collectives,
    graph_cost,
    hidden_cost,
    lower,
    mark_ragged,
    overlap_posted,
    trace,
    workspace_of,
)
from mpar.spec import P
from mpar.strategy import Strategy

__all__ = [
    "Code",
    "SegmentCode",
    "Slices",
    "compile_function",
    "compile_segment",
    "cut",
    "make_code",
    "specs_of",
    "trace_segment",
]


@dataclass(frozen=True)
class Code:
    """A compiled rank graph with what its neighbours must know: values without data and specs of operands and results."""

    kind: Kind
    in_values: tuple[Tensor, ...]
    in_specs: tuple[P, ...]
    out_values: tuple[Tensor, ...]
    out_specs: tuple[P, ...]
    outputs: Any = None  # structure of what the function returns
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TracedSegment:
    """The joint graph: (parameters, x, context, cotangents) to (x, losses, metrics, gradients of parameters and x)."""

    logical: LogicalGraph
    x_out: tuple[Tensor, ...]
    x_structure: Any
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    num_params: int
    num_x: int
    num_context: int

    @property
    def num_results(self) -> int:
        """Results of the forward that its neighbours read."""
        return len(self.x_out) + len(self.losses) + len(self.metrics)


@dataclass(frozen=True, eq=False)
class SegmentCode:
    """A segment compiled for a mesh.

    forward:  (parameters, x, context) -> (x, losses, metrics, kept).
    backward: (its part of those operands, kept, cotangents of x, cotangents of losses) -> gradients of parameters, then of x.
    whole:    where the forward gives losses only: both at once, (parameters, x, context, cotangents of losses) -> (losses,
              metrics, gradients of parameters, then of x). Nothing is kept between them, and what both need is made once.
    reads:    positions in (parameters, x, context) that the backward reads.
    ranked, recompute, kernels: what it was cut from, and how; `program/_split.py` cuts the backward further.
    """

    forward: Code
    backward: Code
    whole: Code | None
    reads: tuple[int, ...]
    num_kept: int
    traced: TracedSegment
    name: str
    ranked: RankGraph
    recompute: RecomputePolicy
    kernels: Kernels


Slices = tuple[SegmentCode, ...]
"""The code of a segment for each slice of a microbatch's rows; where slices see nothing of each other it is one."""


def trace_segment(
    segment: Segment, params: Sequence[Any], x: Any, context: Mapping[str, Tensor], grad_dtypes: Sequence[torch.dtype]
) -> TracedSegment:
    """Trace `segment.fn` with its gradient; arguments are trees of tensors without data, `params` one subtree for each path.

    Gradients of parameters are widened to `grad_dtypes`, leaf by leaf, before anything adds them up. A leaf of x that holds
    integers has a gradient too, of zeros.
    """
    param_leaves, param_structure = tree.flatten(tuple(params))
    x_leaves, x_structure = tree.flatten(() if x is None else x)
    context_leaves, context_structure = tree.flatten(dict(context))
    key = tuple((tuple(t.shape), t.dtype) for t in (*param_leaves, *x_leaves, *context_leaves))
    return _trace_joint(
        segment.fn,
        param_structure,
        x is None,
        x_structure,
        context_structure,
        len(param_leaves),
        len(x_leaves),
        key,
        tuple(grad_dtypes),
    )


@functools.lru_cache(maxsize=256)
def _trace_joint(
    fn: Callable,
    param_structure: Any,
    first: bool,
    x_structure: Any,
    context_structure: Any,
    num_params: int,
    num_x: int,
    key: tuple,
    grad_dtypes: tuple[torch.dtype, ...],
) -> TracedSegment:
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in key]
    params, x, context = metas[:num_params], metas[num_params : num_params + num_x], metas[num_params + num_x :]

    probe: dict[str, Any] = {}

    def call(params: Sequence[Tensor], x: Sequence[Tensor], context: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves of x and losses; metrics."""
        out, losses, *metrics = fn(
            tree.unflatten(param_structure, params),
            None if first else tree.unflatten(x_structure, x),
            tree.unflatten(context_structure, context),
        )
        reported = metrics[0] if metrics else {}
        leaves, probe["structure"] = tree.flatten(() if out is None else out)
        probe["losses"], probe["metrics"] = tuple(sorted(losses)), tuple(sorted(reported))
        return [*leaves, *(losses[name] for name in sorted(losses))], [reported[name] for name in sorted(reported)]

    def shapes(params: Any, x: Any, context: Any) -> list[Tensor]:
        differentiable, metrics = call(params, x, context)
        return [*differentiable, *metrics]

    values = [torch.empty_like(n.meta["val"], device="meta") for n in trace(shapes, (params, x, context)).results]
    num_metrics = len(probe["metrics"])
    num_out = len(values) - len(probe["losses"]) - num_metrics

    def joint(params: Any, x: Any, context: Any, cotangents: Any) -> list[Tensor]:
        moves = [leaf.is_floating_point() for leaf in x]

        def differentiable(params: Sequence[Tensor], moving: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            out, metrics = call(params, _fill(moves, moving, x), context)
            return _floating(out), [*out, *(metric.detach() for metric in metrics)]

        _, pull, *aux = torch.func.vjp(differentiable, params, list(itertools.compress(x, moves)), has_aux=True)
        d_params, d_moving = pull(_floating(cotangents))
        wide = [_widened(d, dtype) for d, dtype in zip(d_params, grad_dtypes, strict=True)]
        return [*aux[0], *wide, *_fill(moves, d_moving, [torch.zeros_like(leaf) for leaf in x])]

    cotangents = [torch.empty_like(value) for value in values[: len(values) - num_metrics]]
    logical = trace(joint, (params, x, context, cotangents))
    names = probe["losses"], probe["metrics"]
    return TracedSegment(logical, tuple(values[:num_out]), probe["structure"], *names, num_params, num_x, len(context))


def _floating(values: Sequence[Tensor]) -> list[Tensor]:
    return [value for value in values if value.is_floating_point()]


def _fill(where: Sequence[bool], chosen: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """`chosen`, in order, where it says so, and `others` elsewhere."""
    rest = iter(chosen)
    return [next(rest) if here else other for here, other in zip(where, others, strict=True)]


def _widened(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return widen(grad, dtype) if torch.promote_types(grad.dtype, dtype) == dtype else grad


def compile_segment(
    name: str,
    traced: TracedSegment,
    mesh: Mesh,
    strategy: Strategy,
    param_specs: Sequence[P],
    x_specs: Sequence[P],
    context_specs: Sequence[P],
    out_specs: Sequence[P],
    recompute: RecomputePolicy,
    kernels: Kernels = KERNELS,
) -> SegmentCode:
    """Lower a traced segment, check it, cut it, generate code. Gradients of parameters come as they are, also pending."""
    num_losses = len(traced.losses)
    cotangent_specs = [*out_specs, *[P()] * num_losses]
    in_specs = [*param_specs, *x_specs, *context_specs, *cotangent_specs]
    wanted = [*out_specs, *[None] * (num_losses + len(traced.metrics) + traced.num_params), *x_specs]
    hints = [*[None] * traced.num_results, *param_specs]
    ranked = lower(traced.logical, mesh, in_specs, wanted, strategy.compute, hints)
    _fill_results(ranked.graph)
    check(ranked)
    mark_ragged(ranked.graph)
    forward, backward, reads, num_kept = _codes(name, traced, ranked, recompute, kernels)
    whole = None if traced.x_out else _whole(name, ranked, kernels)
    return SegmentCode(forward, backward, whole, reads, num_kept, traced, name, ranked, recompute, kernels)


def _fill_results(graph: fx.Graph) -> None:
    """Give results elements of their own, over which sums are written: the gradient of what nothing reads is an expanded zero."""
    expand, clone, full = (getattr(torch.ops.aten, name).default for name in ("expand", "clone", "full"))
    for node in {result for result in graph.output_node().args[0] if result.target == expand}:
        source, value = node.args[0], node.meta["val"]
        with graph.inserting_after(node):
            if source.target == full:
                filled = graph.call_function(full, (list(value.shape), source.args[1]), source.kwargs)
            else:
                filled = graph.call_function(clone, (node,), {"memory_format": torch.contiguous_format})
        filled.meta = dict(node.meta) | {"val": clone(value, memory_format=torch.contiguous_format)}
        graph.output_node().replace_input_with(node, filled)
    graph.eliminate_dead_code()


def _whole(name: str, ranked: RankGraph, kernels: Kernels) -> Code:
    graph = ranked.graph
    results = list(graph.output_node().args[0])
    joint = extract(graph, graph.find_nodes(op="placeholder"), results, set(graph.nodes))
    constants = ranked.logical.constants
    return make_code(f"{name} whole", joint, constants, list(ranked.in_specs), list(ranked.out_specs), kernels)


def cut(traced: TracedSegment, ranked: RankGraph, recompute: RecomputePolicy) -> Halves:
    """A checked rank graph in two, fresh at each call: making code of the halves changes them."""
    num_primals = traced.num_params + traced.num_x + traced.num_context
    num_results = traced.num_results
    return partition(ranked.graph, traced.num_params, traced.num_x, num_primals, num_results, recompute)


def _codes(
    name: str, traced: TracedSegment, ranked: RankGraph, recompute: RecomputePolicy, kernels: Kernels
) -> tuple[Code, Code, tuple[int, ...], int]:
    halves = cut(traced, ranked, recompute)
    num_primals = traced.num_params + traced.num_x + traced.num_context
    num_results = traced.num_results
    constants = ranked.logical.constants
    kept_specs = specs_of(halves.kept)
    specs = list(ranked.in_specs)
    forward = make_code(
        f"{name} forward",
        halves.forward,
        constants,
        specs[:num_primals],
        [*ranked.out_specs[:num_results], *kept_specs],
        kernels,
    )
    forward = replace(forward, fallbacks=ranked.fallbacks)
    backward_in = [*(specs[i] for i in halves.operands), *kept_specs, *specs[num_primals:]]
    backward_out = list(ranked.out_specs[num_results:])
    backward = make_code(f"{name} backward", halves.backward, constants, backward_in, backward_out, kernels)
    return forward, backward, halves.operands, len(halves.kept)


def specs_of(nodes: Sequence[fx.Node]) -> list[P]:
    """Where values of a rank graph live."""
    return [node.meta["spec"] if node.meta.get("spec") is not None else P() for node in nodes]


def compile_function(
    name: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    in_specs: Sequence[P],
    out_specs: Sequence[P | None] | None = None,
    table: Mapping[str, tuple[str, ...]] | None = None,
    *,
    resolve: bool = False,
    kernels: Kernels = KERNELS,
    passes: Sequence[Callable[[fx.Graph], dict[str, int]]] = (),
) -> Code:
    """Compile a function that is not differentiated; `resolve` carries out pending sums of results whose spec is None.

    `passes` run on the checked rank graph.
    """
    logical = trace(fn, args)
    ranked = lower(logical, mesh, in_specs, out_specs, table)
    if resolve and any(spec.partial for spec in ranked.out_specs):
        ranked = lower(logical, mesh, in_specs, [spec.without_partial() for spec in ranked.out_specs], table)
    check(ranked)
    for run in passes:
        run(ranked.graph)
    code = make_code(name, ranked.graph, logical.constants, list(ranked.in_specs), list(ranked.out_specs), kernels)
    return Code(code.kind, code.in_values, code.in_specs, code.out_values, code.out_specs, logical.outputs, ranked.fallbacks)


def make_code(
    name: str, graph: fx.Graph, constants: Mapping[str, Tensor], in_specs: list[P], out_specs: list[P], kernels: Kernels
) -> Code:
    """Compile a checked rank graph, which the last passes change."""
    bucket(graph)
    overlap_posted(graph)
    fuse(graph, kernels)
    reuse_operands(graph)
    uses = choose_kernels(graph, kernels)
    used = {node.target for node in graph.find_nodes(op="get_attr")}
    cost = graph_cost(graph)
    ins = tuple(node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    outs = tuple(node.meta["val"] for node in graph.output_node().args[0])
    kind = Kind(
        name,
        generate(graph),
        {key: value for key, value in constants.items() if key in used},
        tuple(_collective_uses(graph)),
        cost.flops,
        cost.bytes,
        cost.workspace,
        measure(graph, workspace_of),
        len(graph.nodes),
        tuple((tuple(v.shape), v.dtype) for v in ins),
        tuple((tuple(v.shape), v.dtype) for v in outs),
        positions_of(graph),
        uses,
        measure(graph, workspace_of, most=True) if any("ragged" in node.meta for node in graph.nodes) else None,
    )
    if len(outs) != len(out_specs) or len(ins) != len(in_specs):
        raise ProgramError(f"segment {name}: {len(outs)} results for {len(out_specs)} specs")
    return Code(kind, ins, tuple(in_specs), outs, tuple(out_specs))


def _hidden(node: fx.Node) -> tuple[int, int]:
    if node.target not in collectives.POSTED:
        return 0, 0
    cost = hidden_cost(node)
    return cost.flops, cost.bytes


def _collective_uses(graph: fx.Graph) -> list[CollectiveUse]:
    uses = []
    for node in graph.nodes:
        if node.target in collectives.COLLECTIVES:
            num_tensors = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
            how = node.kwargs
            nbytes, ragged = collectives.bytes_of(node), node.target is collectives.exchange_rows
            times = node.args[0][0].meta.get("ragged", 1) if node.target in collectives.POSTED else 0
            uses.append(
                CollectiveUse(
                    node.target.__name__,
                    how["axes"],
                    how["size"],
                    nbytes,
                    num_tensors,
                    node.meta.get("line", ""),
                    *_hidden(node),
                    ragged,
                    nbytes * times,
                )
            )
    return uses
