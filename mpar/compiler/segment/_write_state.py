"""Write state: the state that a segment returns is written over the state that it was given, so that it exists once."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from mpar.ops import PRIMITIVES, primitive_of
from mpar.torch_private import storage_key

__all__ = ["overwritten_operands", "write_state"]

aten = torch.ops.aten
OVER = {PRIMITIVES["write_rows"].op: PRIMITIVES["write_rows_over"].op}
"""Primitives, and those that do the same over their first operand."""


def write_state(graph: fx.Graph, old: slice, new: slice) -> dict[str, int]:
    """Write the results `new` of a graph over its operands `old`, one for each.

    An op that can write over its first operand does so, if this is the old state and nothing else reads it. What other ops give
    is copied over the old state at the end of the graph, after everything that reads it.

    before:  %k2 = write_rows(%k, %rows, %places); %s2 = add(%s, %x); return (%y, %k2, %s2)
    after:   %k2 = write_rows_over(%k, %rows, %places); %s2 = add(%s, %x); %s3 = overwrite(%s, %s2); return (%y, %k2, %s3)
    """
    operands, output = graph.find_nodes(op="placeholder")[old], graph.output_node()
    results = list(output.args[0])
    in_place = 0
    places = range(len(results))[new]
    for operand, place in zip(operands, places, strict=True):
        if results[place] is not operand and _write_in_place(operand, results[place]):
            in_place += 1
    of_old = {storage_key(operand.meta["val"]) for operand in operands}
    of_state = of_old | {storage_key(results[place].meta["val"]) for place in places}
    with graph.inserting_before(output):
        for place, result in enumerate(results):  # what lies in the state is read before this is overwritten, here or later
            is_own = place in places and result is operands[place - places.start]
            if not is_own and storage_key(result.meta["val"]) in (of_old if place in places else of_state):
                results[place] = _call(graph, result, aten.clone.default, (result,))
        copied = 0
        for operand, place in zip(operands, places, strict=True):
            if results[place] is not operand and operand not in _overwritten(results[place]):
                results[place] = _call(graph, results[place], PRIMITIVES["overwrite"].op, (operand, results[place]))
                copied += 1
    output.args = (tuple(results),)
    graph.lint()
    return {"states_in_place": in_place, "states_copied": copied}


def _write_in_place(operand: fx.Node, result: fx.Node) -> bool:
    """Make the op that gives `result` write over its first operand, if that is `operand` and only this op reads it."""
    if result.target not in OVER or result.args[0] is not operand or list(operand.users) != [result]:
        return False
    result.target = OVER[result.target]
    return True


def _call(graph: fx.Graph, like: fx.Node, target: object, args: tuple[fx.Node, ...]) -> fx.Node:
    """A new node whose value looks like that of `like`, but lies in a storage of its own."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = dict(like.meta) | {"val": torch.empty(like.meta["val"].shape, dtype=like.meta["val"].dtype, device="meta")}
    return node


def overwritten_operands(graph: fx.Graph, in_place: Iterable[object]) -> tuple[int, ...]:
    """The indices of the operands of a graph over which its ops write. in_place: torch's ops that write over their first one."""
    storages: dict[int, int] = {}
    for index, operand in enumerate(graph.find_nodes(op="placeholder")):
        storages[storage_key(operand.meta["val"])] = index
    written = {
        storages[key]
        for node in graph.nodes
        for target in (node.args[:1] if node.target in in_place else _overwritten(node))
        for key in _storages(target)
        if key in storages
    }
    return tuple(sorted(written))


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """The operands over which a primitive writes."""
    primitive = primitive_of(node.target)
    if primitive is None or not primitive.mutates:
        return []
    given = zip(primitive.operands, node.args, strict=True)
    return [x for name, argument in given if name in primitive.mutates for x in _nodes(argument)]


def _nodes(argument: object) -> Iterable[fx.Node]:
    return argument if isinstance(argument, (list, tuple)) else (argument,)  # type: ignore[return-value]


def _storages(node: object) -> set[int]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return {storage_key(value)} if isinstance(value, Tensor) else set()
