"""Split: the backward of a segment becomes two graphs, I and W (Qi et al. 2023, arXiv:2401.10241, section 2).

I computes the gradients of the segment's input, W those of its parameters. A value that I computes and W reads is said to cross:
it is held until W runs.

Every op that the gradients of the input need runs in I, every other op in W. There is one exception: a cheap op (norm,
activation, element-wise op, cast, sum) runs in I if fewer bytes are then held until W. A minimum cut decides; ties go to W.
Parameters that W reads count as held, the context does not. Only views, and values computed from parameters or from context
alone, are computed in both halves. A collective, or an op with several results, runs once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import networkx
import torch
from torch import fx

from mpar.compiler.segment._code import Code, SegmentCode
from mpar.compiler.segment._compile import cut, specs_of
from mpar.compiler.segment._make_code import make_code
from mpar.compiler.segment._partition import (
    CHEAP,
    computed_from,
    descendants,
    extract,
    is_view,
    names_of,
    num_bytes,
    producer,
    reaching,
)
from mpar.sharding import collectives

__all__ = ["SplitCode", "SplitGraphs", "split_backward", "split_segment"]

SUMS = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default)


@dataclass(frozen=True)
class SplitCode:
    """The code of the backward of a segment in two halves, which together give the same bits as the backward.

    input:  (primals, kept values and cotangents that it reads) -> (gradients of x, the values that cross).
    weight: (primals and kept values that it reads, the values that cross, cotangents that it reads) -> gradients of
            parameters, in the order of the backward.
    *_reads:      which primals a half reads, as indices into (parameters, x, context).
    *_kept:       which of the values that the forward kept a half reads, as indices.
    *_cotangents: which cotangents a half reads, as indices into those of (x, losses).
    num_crossing: how many values cross.

    A backward that gives no gradient of x, such as that of the first segment, is all W: the input half reads and gives nothing.
    One that gives no gradients of parameters is all I.
    """

    input: Code
    weight: Code
    input_reads: tuple[int, ...]
    input_kept: tuple[int, ...]
    input_cotangents: tuple[int, ...]
    weight_reads: tuple[int, ...]
    weight_kept: tuple[int, ...]
    weight_cotangents: tuple[int, ...]
    num_crossing: int


_SPLIT_CODES: WeakKeyDictionary[SegmentCode, SplitCode] = WeakKeyDictionary()


def split_segment(code: SegmentCode) -> SplitCode:
    """The code of the backward of a segment in two halves, compiled on the first call for a segment."""
    if code not in _SPLIT_CODES:
        _SPLIT_CODES[code] = _split(code)
    return _SPLIT_CODES[code]


def _split(code: SegmentCode) -> SplitCode:
    """Compile the two halves of the backward of a segment."""
    assert code.backward is not None
    traced, num_read, num_kept = code.traced, len(code.reads), code.num_kept
    num_cotangents, num_trained = len(traced.active_out), len(traced.trained)
    all_read = (code.reads, tuple(range(num_kept)), tuple(range(num_cotangents)))
    if not traced.active_x:
        return SplitCode(_nothing(code, "input"), code.backward, (), (), (), *all_read, 0)
    if not traced.trained:
        return SplitCode(code.backward, _nothing(code, "weight"), *all_read, (), (), (), 0)
    first_context = traced.num_params + traced.num_x
    params = [i for i, primal in enumerate(code.reads) if primal < traced.num_params]
    context = [i for i, primal in enumerate(code.reads) if primal >= first_context]
    backward = cut(traced, code.ranked, code.target.recompute).backward
    graphs = split_backward(backward, num_trained, num_cotangents, params, context)

    def by_sort(operands: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Sort indices of operands of the backward into indices of primals, of kept values and of cotangents."""
        return (
            tuple(code.reads[i] for i in operands if i < num_read),
            tuple(i - num_read for i in operands if num_read <= i < num_read + num_kept),
            tuple(i - num_read - num_kept for i in operands if i >= num_read + num_kept),
        )

    specs, out_specs, crossing = code.backward.in_specs, code.backward.out_specs, specs_of(graphs.crossing)
    before = [specs[i] for i in graphs.weight_reads if i < num_read + num_kept]
    after = [specs[i] for i in graphs.weight_reads if i >= num_read + num_kept]
    constants = code.ranked.logical.constants
    return SplitCode(
        make_code(
            f"{code.name} input",
            graphs.input,
            constants,
            [specs[i] for i in graphs.input_reads],
            [*out_specs[num_trained:], *crossing],
            code.target,
        ),
        make_code(
            f"{code.name} weight",
            graphs.weight,
            constants,
            [*before, *crossing, *after],
            list(out_specs[:num_trained]),
            code.target,
        ),
        *by_sort(graphs.input_reads),
        *by_sort(graphs.weight_reads),
        len(crossing),
    )


def _nothing(code: SegmentCode, half: str) -> Code:
    """The code of a half that reads and gives nothing."""
    graph = fx.Graph()
    graph.output(())
    return make_code(f"{code.name} {half}", graph, {}, [], [], code.target)


@dataclass(frozen=True)
class SplitGraphs:
    """The graphs of the two halves of a backward.

    input:    (operands in `input_reads`) -> (gradients of the input, crossing values).
    weight:   (operands in `weight_reads`, with the crossing values before the cotangents) -> gradients of parameters.
    *_reads:  which operands of the backward a half reads, as indices.
    crossing: the nodes of the backward whose values cross, in order.
    """

    input: fx.Graph
    weight: fx.Graph
    input_reads: tuple[int, ...]
    weight_reads: tuple[int, ...]
    crossing: tuple[fx.Node, ...]


def split_backward(
    graph: fx.Graph, num_grads: int, num_cotangents: int, params: Collection[int], context: Collection[int]
) -> SplitGraphs:
    """Split a backward. Its first `num_grads` results are gradients of parameters, the others those of the segment's input.

    Its last `num_cotangents` operands are cotangents; `params` and `context` are the indices of operands that are parameters and
    context.
    """
    operands = graph.find_nodes(op="placeholder")
    results = list(graph.output_node().args[0])
    grads, dx = results[:num_grads], results[num_grads:]
    in_both_halves = _in_both_halves(graph, {operands[i] for i in params}, {operands[i] for i in context})
    input_ops = _choose_input(graph, grads, dx, in_both_halves)
    crossing = _crossing(graph, grads, input_ops, in_both_halves)
    input_from = reaching([*dx, *crossing], set())
    weight_from = reaching(grads, set(crossing))
    input_reads = tuple(i for i, node in enumerate(operands) if node in input_from)
    weight_reads = tuple(i for i, node in enumerate(operands) if node in weight_from)
    spine = set(graph.nodes)
    input_half = extract(graph, [operands[i] for i in input_reads], [*dx, *crossing], spine)
    first_cotangent = len(operands) - num_cotangents
    before = [operands[i] for i in weight_reads if i < first_cotangent]
    after = [operands[i] for i in weight_reads if i >= first_cotangent]
    weight_half = extract(graph, [*before, *crossing, *after], grads, spine)
    return SplitGraphs(input_half, weight_half, input_reads, weight_reads, tuple(crossing))


def _in_both_halves(graph: fx.Graph, params: set[fx.Node], context: set[fx.Node]) -> set[fx.Node]:
    """The nodes that both halves may compute.

    These are views, and what follows from parameters alone or from context alone without communication. The context itself is
    among them, because holding it until W costs nothing. Parameters are not: they may have to be gathered for W.
    """
    views = {node for node in graph.nodes if is_view(node)}
    after_collectives = descendants(graph, {node for node in graph.nodes if node.target in collectives.COLLECTIVES})
    without_others = computed_from(graph, params) | computed_from(graph, context)
    return (views | without_others - after_collectives) - params


def _choose_input(graph: fx.Graph, grads: Sequence[fx.Node], dx: Sequence[fx.Node], in_both_halves: set[fx.Node]) -> set[fx.Node]:
    """The ops of I: all that `dx` needs, and those cheap ones that reduce the bytes held until W.

    A minimum cut divides the ops into those of I and those of W. Its edges say: if an op is in I, the ops whose results it reads
    are in I too; and a value that I computes, or that is an operand, costs its bytes unless all ops that read it are in I.
    """
    needed = {producer(node) for node in reaching(dx, set()) - in_both_halves}
    flow = networkx.DiGraph()
    flow.add_nodes_from(("input", "weight"))
    for op in {producer(node) for node in reaching(grads, set()) - in_both_halves}:
        if op in needed or op.op == "placeholder":
            flow.add_edge("input", op)
            continue
        if not _is_cheap(op):
            flow.add_edge(op, "weight")
        for value in _values_needed(op.all_input_nodes, in_both_halves):
            flow.add_edge((value, "held"), op)
            flow.add_edge(op, producer(value))
            flow.add_edge(producer(value), (value, "held"), capacity=num_bytes([value]))
    for value in _values_needed(grads, in_both_halves):
        flow.add_edge((value, "held"), "weight")
        flow.add_edge(producer(value), (value, "held"), capacity=num_bytes([value]))
    # the reversed network gives, among the minimum cuts, the one with the most ops in W
    _, (_, input_side) = networkx.minimum_cut(flow.reverse(), "weight", "input")
    return needed | {node for node in input_side if isinstance(node, fx.Node)}


def _crossing(graph: fx.Graph, grads: Sequence[fx.Node], input_ops: set[fx.Node], in_both_halves: set[fx.Node]) -> list[fx.Node]:
    """The values of `input_ops` that W needs, besides operands, to compute `grads`."""
    crossing: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(_values_needed(grads, in_both_halves))
    while todo:
        value = todo.pop()
        if value in seen or value.op != "call_function":
            continue
        seen.add(value)
        if producer(value) in input_ops:
            crossing.add(value)
        else:
            todo.extend(_values_needed(producer(value).all_input_nodes, in_both_halves))
    return [node for node in graph.nodes if node in crossing]


def _values_needed(nodes: Iterable[fx.Node], in_both_halves: set[fx.Node]) -> set[fx.Node]:
    """`nodes`, but in place of each that both halves may compute, the values from which it is computed."""
    needed: set[fx.Node] = set()
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node in in_both_halves:
                todo.extend(node.all_input_nodes)
            else:
                needed.add(node)
    return needed


def _is_cheap(op: fx.Node) -> bool:
    return bool(names_of(op) & CHEAP) or op.target in SUMS
