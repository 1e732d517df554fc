"""Lower control flow: each body becomes a rank graph of its own, and what is carried has the same spec at both ends of it.

Which spec that is, is searched for. Carries enter as they are; if the body gives one of them another spec, either it is moved
back at the end of every turn, or it enters with that other spec and the body is lowered anew; so it may enter as the part of it
that the body reads. Of all ways, the one by which a rank receives the fewest bytes is taken, then the one with the smallest
results, then the one that computes the least.
Pending sums are carried out before they enter a body; those that it leaves in ys and sums stay pending behind the loop.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from mpar.mesh import Mesh
from mpar.sharding import _collectives as collectives
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._control import CONTROL, Cond, Flow, HasGraph, Scan, While
from mpar.sharding._cost import graph_cost
from mpar.sharding._redistribute import Move, plan, plan_bytes
from mpar.sharding._trace import LogicalGraph
from mpar.spec import P
from mpar.torch_private import storage_key

__all__ = ["lower_control"]


class Lowered(HasGraph, Protocol):
    """A lowered body."""

    @property
    def in_specs(self) -> tuple[P, ...]:
        """The specs of its operands."""
        ...

    @property
    def out_specs(self) -> tuple[P, ...]:
        """The specs of its results."""
        ...


class Lowering(Protocol):
    """What is needed here of the lowering of the graph in which control flow stands."""

    mesh: Mesh
    specs: dict[fx.Node, P]
    tuples: dict[fx.Node, list[tuple[fx.Node, P]]]

    def emit(self, target: Callable, args: Sequence[object], kwargs: Mapping[str, object]) -> fx.Node:
        """Add a local node."""
        ...

    def redistribute(self, node: fx.Node, target: P) -> fx.Node:
        """The local node that holds `node` at the spec `target`."""
        ...

    def cheapest(self, node: fx.Node, target: P) -> tuple[int, P, list[Move]]:
        """The bytes that a rank receives on the cheapest way to the spec `target`, where the way begins, and its moves."""
        ...

    def in_mesh_order(self, spec: P) -> P:
        """`spec` without axes of a dim that are not in mesh order."""
        ...

    def nested(self, body: LogicalGraph, in_specs: list[P], out_specs: Sequence[P | None]) -> "Lowered":
        """A body, lowered for these specs."""
        ...


NUM_ROUNDS = 4
"""So many specs of carries are tried."""
TURNS_OF_WHILE = 100
"""As many turns a loop with a test is taken to have, where what is moved before it is weighed against what is moved in it."""


def lower_control(lowering: Lowering, node: fx.Node) -> None:
    """Add the node of a flow with lowered bodies, and note the local nodes and specs of its results."""
    flow: Flow = node.kwargs["flow"]
    operands = list(node.args[0])
    lower_flow: Any = {Scan: _lower_scan, Cond: _lower_cond, While: _lower_while}[type(flow)]
    lowered, targets, specs = lower_flow(lowering, flow, operands)
    copied, results = set(), range(len(specs))
    if isinstance(flow, Scan):
        copied = set(flow.parts(results)[1])
    for body in lowered.bodies.values():
        _unshare_results(body.graph, copied)
    locals_ = [lowering.redistribute(operand, target) for operand, target in zip(operands, targets, strict=True)]
    local = lowering.emit(CONTROL[type(flow)], (locals_,), {"flow": lowered})
    local.meta["result_specs"] = specs
    items = [lowering.emit(operator.getitem, (local, index), {}) for index in range(len(specs))]
    lowering.tuples[node] = list(zip(items, specs, strict=True))


def _entering(lowering: Lowering, operand: fx.Node, *, turns: bool = False) -> P:
    """The spec with which an operand enters a body: without pending sums, and not sharded along the dim of the turns, if it has
    one, which is left out."""
    dims = lowering.specs[operand].dims
    return lowering.in_mesh_order(P(*dims[1:] if turns else dims))


def _stacked(spec: P) -> P:
    """The spec of a stack of values with this spec."""
    return P((), *spec.dims, partial=spec.partial)


def _lower_scan(lowering: Lowering, flow: Scan[LogicalGraph], operands: list[fx.Node]) -> tuple[Scan[Any], list[P], list[P]]:
    carries, xs, captured = flow.operands(operands)
    outside = [*(_entering(lowering, x, turns=True) for x in xs), *(_entering(lowering, x) for x in captured)]

    def _close(entering: list[P], leaving: list[P | None]) -> Scan[Any]:
        free = [None] * (len(flow.body.results) - len(leaving))
        return flow.with_bodies(body=lowering.nested(flow.body, [*entering, *outside], [*leaving, *free]))

    lowered = _fixed_point(lowering, carries, _close, flow.length)
    entering = list(lowered.body.in_specs[: flow.num_carries])
    targets = [*entering, *(_stacked(spec) for spec in outside[: len(xs)]), *outside[len(xs) :]]
    carried, ys, sums = flow.parts(lowered.body.out_specs)
    return lowered, targets, [*carried, *map(_stacked, ys), *sums]


def _lower_while(lowering: Lowering, flow: While[LogicalGraph], operands: list[fx.Node]) -> tuple[While[Any], list[P], list[P]]:
    outside = [_entering(lowering, x) for x in operands[flow.num_carries :]]

    def _close(entering: list[P], leaving: list[P | None]) -> While[Any]:
        specs = [*entering, *outside]
        return flow.with_bodies(test=lowering.nested(flow.test, specs, [P()]), body=lowering.nested(flow.body, specs, leaving))

    lowered = _fixed_point(lowering, operands[: flow.num_carries], _close, TURNS_OF_WHILE)
    return lowered, list(lowered.body.in_specs), list(lowered.body.out_specs)


def _fixed_point(lowering: Lowering, carries: list[fx.Node], close: Any, num_turns: int) -> Any:
    """The flow, lowered by `close(specs of carries that enter, those that must leave or None)`, whose carries leave as they enter
    and which is the cheapest of those that are tried."""
    nc = len(carries)
    todo = [[_entering(lowering, carry) for carry in carries]]
    best: tuple[tuple[float, ...], Any] | None = None
    for entering in todo:  # which grows meanwhile
        free = close(entering, [None] * nc)
        closed = free if list(free.body.out_specs[:nc]) == entering else close(entering, entering)
        cost = _cost(lowering, carries, closed, num_turns)
        if best is None or cost < best[0]:
            best = cost, closed
        leaving = [spec.without_partial() for spec in free.body.out_specs[:nc]]
        given = free.body.graph.find_nodes(op="placeholder")[:nc]
        read = [lowering.in_mesh_order(_narrowed(node)) for node in given]
        todo += [specs for specs in (leaving, read) if specs not in todo and len(todo) < NUM_ROUNDS]
    assert best is not None
    return best[1]


def _cost(lowering: Lowering, carries: list[fx.Node], flow: Any, num_turns: int) -> tuple[float, ...]:
    """What is compared of a flow whose carries enter its body with these specs: bytes that a rank receives, before it and in it,
    then those of its results, then those that its ops read and write."""
    before = sum(_bytes_to(lowering, *pair) for pair in zip(carries, flow.body.in_specs, strict=False))
    costs = [graph_cost(body.graph) for body in flow.bodies.values()]
    kept = sum(node.meta["val"].nbytes for node in flow.body.graph.output_node().args[0])
    return before + num_turns * sum(received for received, _ in costs), kept, sum(touched for _, touched in costs)


def _narrowed(node: fx.Node) -> P:
    """The spec at which a body reads a carry, if it takes a part of it first."""
    part = next((user for user in node.users if user.target is collectives.shard), None)
    return node.meta["spec"] if part is None else _narrowed(part)


def _bytes_to(lowering: Lowering, operand: fx.Node, spec: P) -> int:
    return lowering.cheapest(operand, spec)[0]


def _lower_cond(lowering: Lowering, flow: Cond[LogicalGraph], operands: list[fx.Node]) -> tuple[Cond[Any], list[P], list[P]]:
    given = operands[1:]
    entering = [_entering(lowering, x) for x in given]
    num_results = len(flow.if_true.results)
    free = {name: lowering.nested(body, entering, [None] * num_results) for name, body in flow.bodies.items()}
    columns = list(zip(*(body.out_specs for body in free.values()), strict=True))
    specs = [_agreed(lowering, node, pair) for node, pair in zip(flow.if_true.results, columns, strict=True)]
    bodies = {
        name: body if list(body.out_specs) == specs else lowering.nested(flow.bodies[name], entering, specs)
        for name, body in free.items()
    }
    return flow.with_bodies(**bodies), [P(), *entering], specs


def _agreed(lowering: Lowering, result: fx.Node, pair: Sequence[P]) -> P:
    """The spec to which the results of both branches are moved: the one of the two to which the other moves with fewer bytes.

    Sums that only one branch leaves pending are carried out in it.
    """
    if pair[0] == pair[1]:
        return pair[0]
    plain = [spec.without_partial() for spec in pair]

    def received(target: P) -> int:
        nbytes, rank = result.meta["val"].nbytes, len(shape_of(result))
        return sum(plan_bytes(plan(spec, target, rank, lowering.mesh), nbytes, lowering.mesh) for spec in pair)

    return min(plain, key=received)


def _unshare_results(graph: fx.Graph, copied: set[int]) -> None:
    """Copy each result of a body that shares memory with an operand or another result, or is a part of a larger tensor.

    copied: the numbers of results that are put into stacks anyway.
    """
    taken = {storage_key(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    output, results = graph.output_node(), []
    for number, node in enumerate(output.args[0]):
        value = node.meta["val"]
        if number in copied:
            results.append(node)
            continue
        if storage_key(value) in taken or not value.is_contiguous() or value.untyped_storage().nbytes() > value.nbytes:
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(node.meta) | {"val": torch.empty(value.shape, dtype=value.dtype, device="meta"), "labels": ()}
            node = copy
        taken.add(storage_key(node.meta["val"]))
        results.append(node)
    output.args = (tuple(results),)
