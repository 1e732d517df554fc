"""Compile: a traced segment, or a small function without gradient, is lowered for the mesh, checked and made code.

A segment is cut into forward and backward on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from mpar.compiler.segment._add_products import add_products
from mpar.compiler.segment._code import Code, SegmentCode, SegmentSpecs, Target, TracedSegment
from mpar.compiler.segment._join_products import join_products
from mpar.compiler.segment._make_code import make_code
from mpar.compiler.segment._partition import Halves, RecomputePolicy, extract, partition
from mpar.compiler.segment._write_state import write_state
from mpar.sharding import RankGraph, check, lower, mark_ragged, trace
from mpar.spec import P
from mpar.tree import Tree

__all__ = ["compile_function", "compile_segment", "cut", "specs_of"]


def compile_segment(name: str, traced: TracedSegment, specs: SegmentSpecs, target: Target) -> SegmentCode:
    """Lower a traced segment, check the rank graph, cut it into forward and backward, and make code of them.

    A segment that was traced without gradients has a forward only, which writes new state over the old one. Gradients of
    parameters keep the specs that the lowering gives them and may stay pending sums: instructions `reduce` sum them and move
    them. Gradients of x get the specs of x.
    """
    if not traced.has_gradients:
        return _compile_forward(name, traced, specs, target)
    num_losses = len(traced.losses)
    results = [*specs.out, *[P()] * num_losses]
    in_specs = [*specs.params, *specs.x, *specs.context, *(results[i] for i in traced.active_out)]
    reported_and_trained = [None] * (num_losses + len(traced.metrics) + len(traced.trained))
    out_specs = [*specs.out, *reported_and_trained, *(specs.x[i] for i in traced.active_x)]
    hints = [*[None] * traced.num_results, *(specs.params[i] for i in traced.trained)]
    ranked = lower(traced.logical, target.mesh, in_specs, out_specs, target.table, hints)
    _fill_results(ranked.graph)
    check(ranked)
    add_products(ranked.graph)
    mark_ragged(ranked.graph)
    joint = None if traced.x_out else _joint_code(name, ranked, target)
    return _cut_in_two(name, traced, ranked, target, joint)


def _compile_forward(name: str, traced: TracedSegment, specs: SegmentSpecs, target: Target) -> SegmentCode:
    """Compile a segment that was traced without gradients."""
    in_specs = [*specs.params, *specs.x, *specs.context]
    out_specs = [*specs.out, *[None] * len((*traced.losses, *traced.metrics))]
    ranked = lower(traced.logical, target.mesh, in_specs, out_specs, target.table)
    check(ranked)
    add_products(ranked.graph)
    mark_ragged(ranked.graph)
    graph, state = ranked.graph, slice(traced.num_params + traced.num_x - traced.num_state, traced.num_params + traced.num_x)
    results = list(graph.output_node().args[0])
    forward_graph = extract(graph, graph.find_nodes(op="placeholder"), results, set(graph.nodes))
    join_products(forward_graph, forward_graph.find_nodes(op="placeholder")[: traced.num_params])
    write_state(forward_graph, state, slice(len(traced.x_out) - traced.num_state, len(traced.x_out)))
    constants = ranked.logical.constants
    forward = make_code(f"{name} forward", forward_graph, constants, list(ranked.in_specs), list(ranked.out_specs), target)
    forward = replace(forward, fallbacks=ranked.fallbacks)
    return SegmentCode(name, traced, ranked, target, forward, backward=None, joint=None, reads=(), num_kept=0)


def _fill_results(graph: fx.Graph) -> None:
    """Replace each result that is an `expand` by a tensor with memory for all its elements.

    Later gradients are added in place to earlier ones, which an expanded tensor does not allow: its elements share memory. The
    gradient of a parameter that the segment does not read is such a tensor, an expanded zero.
    """
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


def _joint_code(name: str, ranked: RankGraph, target: Target) -> Code:
    """The code of forward and backward as one."""
    graph = ranked.graph
    results = list(graph.output_node().args[0])
    joint = extract(graph, graph.find_nodes(op="placeholder"), results, set(graph.nodes))
    constants = ranked.logical.constants
    code = make_code(f"{name} whole", joint, constants, list(ranked.in_specs), list(ranked.out_specs), target)
    return replace(code, fallbacks=ranked.fallbacks)


def cut(traced: TracedSegment, ranked: RankGraph, recompute: RecomputePolicy) -> Halves:
    """Cut a checked rank graph into forward and backward. Each call makes new graphs, because `make_code` changes its graph."""
    return partition(ranked.graph, traced.num_params, traced.num_x, traced.num_primals, traced.num_results, recompute)


def _cut_in_two(name: str, traced: TracedSegment, ranked: RankGraph, target: Target, joint: Code | None) -> SegmentCode:
    """Cut a checked rank graph into forward and backward, and make code of each."""
    halves = cut(traced, ranked, target.recompute)
    num_primals, num_results = traced.num_primals, traced.num_results
    constants, specs = ranked.logical.constants, list(ranked.in_specs)
    kept_specs = specs_of(halves.kept)
    forward_out = [*ranked.out_specs[:num_results], *kept_specs]
    forward = make_code(f"{name} forward", halves.forward, constants, specs[:num_primals], forward_out, target)
    backward_in = [*(specs[i] for i in halves.operands), *kept_specs, *specs[num_primals:]]
    backward_out = list(ranked.out_specs[num_results:])
    backward = make_code(f"{name} backward", halves.backward, constants, backward_in, backward_out, target)
    return SegmentCode(
        name=name,
        traced=traced,
        ranked=ranked,
        target=target,
        forward=replace(forward, fallbacks=ranked.fallbacks),
        backward=backward,
        joint=joint,
        reads=halves.operands,
        num_kept=len(halves.kept),
    )


def specs_of(nodes: Sequence[fx.Node]) -> list[P]:
    """The specs of values of a rank graph; replicated where a node has none."""
    return [node.meta["spec"] if node.meta.get("spec") is not None else P() for node in nodes]


def compile_function(
    name: str,
    fn: Callable[..., object],
    args: Sequence[Tree],
    target: Target,
    in_specs: Sequence[P],
    out_specs: Sequence[P | None] | None = None,
    *,
    resolve: bool = False,
    passes: Sequence[Callable[[fx.Graph], dict[str, int]]] = (),
) -> Code:
    """Compile a function that is not differentiated.

    out_specs: the specs of the results; None leaves a result as the lowering makes it.
    resolve:   whether results that would be pending sums are summed at once.
    passes:    passes that run on the checked rank graph before code is made of it.
    """
    logical = trace(fn, args)
    ranked = lower(logical, target.mesh, in_specs, out_specs, target.table)
    if resolve and any(spec.partial for spec in ranked.out_specs):
        ranked = lower(logical, target.mesh, in_specs, [spec.without_partial() for spec in ranked.out_specs], target.table)
    check(ranked)
    for run in passes:
        run(ranked.graph)
    code = make_code(name, ranked.graph, logical.constants, list(ranked.in_specs), list(ranked.out_specs), target)
    return replace(code, outputs=logical.outputs, fallbacks=ranked.fallbacks)
