"""Split: the backward of a segment becomes two graphs. I gives the gradients of the segment's input, W those of its parameters
that I did not make on the way (Qi et al. 2023, arXiv:2401.10241, section 2).

Nothing is computed twice but views and what follows from parameters or from context alone. Every op that the gradient of the
input needs runs in I. Of the others all run in W, except that cheap ones (norms, activations, element-wise ops, casts, sums)
run in I where fewer bytes are held until W then: a minimum cut decides, ties go to W. Parameters that W reads count as held,
the context does not. An op with several results runs once, and so does a collective: what W needs of them crosses.
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
    """The backward of a segment in two parts; together they give its very bits.

    input:  (primals, kept, cotangents that it reads) -> gradients of x, then the values that cross.
    weight: (primals, kept that it reads, the values that cross, cotangents that it reads) -> gradients of all parameters, in the
            order of the backward.
    *_reads, *_kept, *_cotangents: what a part reads, by position in (parameters, x, context), in what the forward kept, in the
            cotangents of (x, losses).

    A segment without x (the first) leaves all to W: its input half takes and gives nothing. One without parameters is all I.
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


_DONE: WeakKeyDictionary[SegmentCode, SplitCode] = WeakKeyDictionary()


def split_segment(code: SegmentCode) -> SplitCode:
    """The backward of a segment in two parts, compiled when first asked for."""
    if code not in _DONE:
        _DONE[code] = _split(code)
    return _DONE[code]


def _split(code: SegmentCode) -> SplitCode:
    traced, num_read, num_kept = code.traced, len(code.reads), code.num_kept
    num_cotangents = len(traced.x_out) + len(traced.losses)
    all_read = (code.reads, tuple(range(num_kept)), tuple(range(num_cotangents)))
    if traced.num_x == 0:
        return SplitCode(_nothing(code, "input"), code.backward, (), (), (), *all_read, 0)
    if traced.num_params == 0:
        return SplitCode(code.backward, _nothing(code, "weight"), *all_read, (), (), (), 0)
    first_context = traced.num_params + traced.num_x
    params = [i for i, primal in enumerate(code.reads) if primal < traced.num_params]
    context = [i for i, primal in enumerate(code.reads) if primal >= first_context]
    backward = cut(traced, code.ranked, code.target.recompute).backward
    graphs = split_backward(backward, traced.num_params, num_cotangents, params, context)

    def sorted_out(positions: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (
            tuple(code.reads[i] for i in positions if i < num_read),
            tuple(i - num_read for i in positions if num_read <= i < num_read + num_kept),
            tuple(i - num_read - num_kept for i in positions if i >= num_read + num_kept),
        )

    specs, out_specs, crossing = code.backward.in_specs, code.backward.out_specs, specs_of(graphs.crossing)
    before = [specs[i] for i in graphs.weight_reads if i < num_read + num_kept]
    after = [specs[i] for i in graphs.weight_reads if i >= num_read + num_kept]
    constants, num_params = code.ranked.logical.constants, traced.num_params
    return SplitCode(
        make_code(
            f"{code.name} input",
            graphs.input,
            constants,
            [specs[i] for i in graphs.input_reads],
            [*out_specs[num_params:], *crossing],
            code.target.kernels,
        ),
        make_code(
            f"{code.name} weight",
            graphs.weight,
            constants,
            [*before, *crossing, *after],
            list(out_specs[:num_params]),
            code.target.kernels,
        ),
        *sorted_out(graphs.input_reads),
        *sorted_out(graphs.weight_reads),
        len(crossing),
    )


def _nothing(code: SegmentCode, half: str) -> Code:
    graph = fx.Graph()
    graph.output(())
    return make_code(f"{code.name} {half}", graph, {}, [], [], code.target.kernels)


@dataclass(frozen=True)
class SplitGraphs:
    """input: (operands at `input_reads`) -> (gradients of the input, crossing values).

    weight: (operands at `weight_reads`, the crossing values before the cotangents) -> gradients of parameters.
    The reads are positions among the operands of the backward; `crossing` are its nodes that cross, in order.
    """

    input: fx.Graph
    weight: fx.Graph
    input_reads: tuple[int, ...]
    weight_reads: tuple[int, ...]
    crossing: tuple[fx.Node, ...]


def split_backward(
    graph: fx.Graph, num_grads: int, num_cotangents: int, params: Collection[int], context: Collection[int]
) -> SplitGraphs:
    """Split a backward whose first `num_grads` results are gradients of parameters, the others those of the segment's input.

    Its last `num_cotangents` operands are cotangents; `params`, `context`: which are parameters and context, by position.
    """
    operands = graph.find_nodes(op="placeholder")
    results = list(graph.output_node().args[0])
    grads, dx = results[:num_grads], results[num_grads:]
    twice = _twice(graph, {operands[i] for i in params}, {operands[i] for i in context})
    early = _choose_input(graph, grads, dx, twice)
    crossing = _crossing(graph, grads, early, twice)
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


def _twice(graph: fx.Graph, params: set[fx.Node], context: set[fx.Node]) -> set[fx.Node]:
    """What both halves may make: views and what follows from parameters or from context alone, without communication. The
    context, which costs nothing to hold, is among it; parameters, which may have to be gathered for W, are not."""
    views = {node for node in graph.nodes if is_view(node)}
    met = descendants(graph, {node for node in graph.nodes if node.target in collectives.COLLECTIVES})
    alone = computed_from(graph, params) | computed_from(graph, context)
    return (views | alone - met) - params


def _choose_input(graph: fx.Graph, grads: Sequence[fx.Node], dx: Sequence[fx.Node], twice: set[fx.Node]) -> set[fx.Node]:
    """The ops of I: all that `dx` needs, and the cheap ones without which more bytes would be held until W.

    In the network an op or a value is on the side of I or of W. An op of I has the ops before it in I; a value made (or, for an
    operand, there) in I is held, at the cost of its bytes, unless all its readers are in I.
    """
    needed = {producer(node) for node in reaching(dx, set()) - twice}
    flow = networkx.DiGraph()
    flow.add_nodes_from(("input", "weight"))
    for op in {producer(node) for node in reaching(grads, set()) - twice}:
        if op in needed or op.op == "placeholder":
            flow.add_edge("input", op)
            continue
        if not _is_cheap(op):
            flow.add_edge(op, "weight")
        for value in _read(op.all_input_nodes, twice):
            flow.add_edge((value, "held"), op)
            flow.add_edge(op, producer(value))
            flow.add_edge(producer(value), (value, "held"), capacity=num_bytes([value]))
    for value in _read(grads, twice):
        flow.add_edge((value, "held"), "weight")
        flow.add_edge(producer(value), (value, "held"), capacity=num_bytes([value]))
    _, (_, input_side) = networkx.minimum_cut(flow.reverse(), "weight", "input")  # reversed: the side of W is the largest
    return needed | {node for node in input_side if isinstance(node, fx.Node)}


def _crossing(graph: fx.Graph, grads: Sequence[fx.Node], early: set[fx.Node], twice: set[fx.Node]) -> list[fx.Node]:
    """The values of ops in `early` from which, with operands, all of `grads` follow."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(_read(grads, twice))
    while todo:
        value = todo.pop()
        if value in seen or value.op != "call_function":
            continue
        seen.add(value)
        if producer(value) in early:
            found.add(value)
        else:
            todo.extend(_read(producer(value).all_input_nodes, twice))
    return [node for node in graph.nodes if node in found]


def _read(nodes: Iterable[fx.Node], twice: set[fx.Node]) -> set[fx.Node]:
    """The values that must be there for `nodes`: what both halves may make is replaced by what it is made of."""
    found: set[fx.Node] = set()
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node in twice:
                todo.extend(node.all_input_nodes)
            else:
                found.add(node)
    return found


def _is_cheap(op: fx.Node) -> bool:
    return bool(names_of(op) & CHEAP) or op.target in SUMS
