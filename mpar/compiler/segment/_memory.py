"""Measure which storages the ops of a rank graph make and drop. Only shapes and dtypes are needed, no data."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from mpar.ir import SegmentMemory
from mpar.ops import primitive_of
from mpar.sharding import held_inside
from mpar.torch_private import storage_key

__all__ = ["measure"]


def measure(graph: fx.Graph, workspace: Callable[[fx.Node], int], *, all_rows_come: bool = False) -> SegmentMemory:
    """Which storages the ops of a rank graph make and drop.

    workspace:     `workspace(node)` is the number of bytes that an op allocates and frees while it runs.
    all_rows_come: ragged values get the size that they have if a router sends all rows to this rank; else their size on average.
    """
    numbers: dict[Hashable, int] = {}
    sizes: list[int] = []
    held: dict[fx.Node, tuple[int, ...]] = {}
    ragged_factor = 1

    def number(key: Hashable, nbytes: int) -> int:
        if key not in numbers:
            numbers[key] = len(sizes)
            sizes.append(nbytes * ragged_factor)
        return numbers[key]

    order, inputs = [node for node in graph.nodes if node.op in ("placeholder", "call_function", "get_attr")], []
    for node in order:
        if node.op == "placeholder":
            ragged_factor = node.meta.get("ragged", 1) if all_rows_come else 1
            held[node] = _storages(node.meta["val"], number)
            inputs.append(held[node][0])
    constants = {node for node in order if node.op == "get_attr"}
    last_reader: dict[int, int] = {}  # storage -> the index of the last call that makes or reads it
    made: list[list[int]] = []
    calls = [node for node in order if node.op == "call_function"]
    for index, node in enumerate(calls):
        num_known, ragged_factor = len(sizes), node.meta.get("ragged", 1) if all_rows_come else 1
        reused = _reused(node, held)
        if reused is not None:
            numbers |= dict(zip(map(storage_key, _tensors(node.meta["val"])[-len(reused) :]), reused, strict=True))
        held[node] = _storages(node.meta["val"], number)
        if inside := held_inside(node):  # made and dropped while the node runs
            last_reader[number(node, inside)] = index
        made.append(list(range(num_known, len(sizes))))
        for used in (node, *node.all_input_nodes):
            for storage in held.get(used, ()) if used not in constants else ():
                last_reader[storage] = index
    results = [
        held[node][0] if node not in constants else number(node, node.meta["val"].nbytes) for node in graph.output_node().args[0]
    ]
    drops: list[list[int]] = [[] for _ in calls]
    for storage, index in last_reader.items():
        if storage not in results:
            drops[index].append(storage)
    idle = [storage for storage in dict.fromkeys(inputs) if storage not in last_reader and storage not in results]
    events = tuple((tuple(m), tuple(sorted(d))) for m, d in zip(made, drops, strict=True))
    workspaces = tuple(map(workspace, calls))
    return SegmentMemory(tuple(inputs), tuple(results), tuple(sizes), events, workspaces, tuple(idle))


def _storages(value: Any, number: Any) -> tuple[int, ...]:
    """The number of the storage of each tensor in `value`; `number(key, nbytes)` gives new storages a number."""
    return tuple(number(storage_key(v), v.untyped_storage().nbytes()) for v in _tensors(value))


def _reused(node: fx.Node, held: dict[fx.Node, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The storages of the last results of an op that writes them over its operands; None for any other op."""
    primitive = primitive_of(node.target)
    if primitive is None or not primitive.mutates:
        return None
    by_name = dict(zip(primitive.operands, node.args, strict=True))
    return tuple(s for name in primitive.mutates[: len(primitive.results)] for n in _nodes(by_name[name]) for s in held[n])


def _nodes(argument: Any) -> Iterable[fx.Node]:
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
