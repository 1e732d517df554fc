"""Simulate: run a rank graph on all ranks in one process, node by node; a collective combines the values of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpar.collectives import combine
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.ops import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._control import CONTROL, Cond, Scan
from mpar.sharding._lower import RankGraph
from mpar.shards import assemble, shard
from mpar.spec import P

__all__ = ["distribute", "implementation", "run_lockstep", "simulate_graph"]


def simulate_graph(ranked: RankGraph, args: Sequence[Tensor]) -> list[Tensor]:
    """Run `ranked` on global tensors: cut them into shards, run every rank, and assemble the results.

    Raises ShardingError if ranks that should hold the same value do not, bit for bit.
    """
    columns = [distribute(arg, spec, ranked.mesh) for arg, spec in zip(args, ranked.in_specs, strict=True)]
    results = run_lockstep(ranked.graph, ranked.mesh, columns, ranked.logical.constants)
    return [assemble(column, spec, ranked.mesh) for column, spec in zip(results, ranked.out_specs, strict=True)]


def distribute(x: Tensor, spec: P, mesh: Mesh) -> list[Tensor]:
    """Every rank's shard of a global tensor. Of a pending sum the ranks at the first coordinate have the value, the others 0."""
    shards = [shard(x, spec, mesh, rank) for rank in range(mesh.size)]
    return [torch.zeros_like(local) if mesh.index(rank, spec.partial) else local for rank, local in enumerate(shards)]


def run_lockstep(
    graph: fx.Graph, mesh: Mesh, columns: Sequence[Sequence[Tensor]], constants: Mapping[str, Tensor]
) -> list[list[Tensor]]:
    """Run `graph` on every rank. `columns` has for each placeholder the value on every rank; results come in the same form."""
    env: dict[fx.Node, list[Any]] = {}
    remaining = {node: len(node.users) for node in graph.nodes}
    inputs = iter(columns)
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = list(next(inputs))
        elif node.op == "get_attr":
            env[node] = [constants[node.target]] * mesh.size
        elif node.op == "output":
            return [env[result] for result in node.args[0]]
        elif node.target in collectives.POSTED:
            env[node] = _post(node, env, mesh)
        elif node.target in CONTROL.values():
            env[node] = _run_flow(node, [env[operand] for operand in node.args[0]], mesh)
        elif node.target is collectives.arrived:
            env[node] = env[node.args[0]]
        elif node.target in collectives.COLLECTIVES:
            axes = node.kwargs["axes"]
            params = {key: value for key, value in node.kwargs.items() if key not in ("axes", "size")}
            if axes not in groups:
                groups[axes] = list(mesh.groups(axes))
            out: list[Any] = [None] * mesh.size
            for group in groups[axes]:
                parts = [env[node.args[0]][rank] for rank in group]
                for rank, result in zip(group, combine(node.target.__name__, parts, **params), strict=True):
                    out[rank] = result
            env[node] = out
        elif node.target is collectives.shard:
            size, dim = node.kwargs["size"], node.kwargs["dim"]
            index = [mesh.index(rank, node.kwargs["axes"]) for rank in range(mesh.size)]
            env[node] = [
                x.narrow(dim, i * (x.shape[dim] // size), x.shape[dim] // size)
                for x, i in zip(env[node.args[0]], index, strict=True)
            ]
        elif node.target is collectives.start:
            env[node] = [mesh.index(rank, node.kwargs["axes"]) * node.kwargs["extent"] for rank in range(mesh.size)]
        else:
            fn = implementation(node.target)
            env[node] = [_call(fn, node, env, rank) for rank in range(mesh.size)]
        for used in node.all_input_nodes:
            remaining[used] -= 1
            if not remaining[used]:
                del env[used]
    raise AssertionError("graph without output")


def _run_flow(node: fx.Node, columns: list[list[Tensor]], mesh: Mesh) -> list[list[Tensor]]:
    """The results of control flow on every rank: all ranks run the same turns, and take the same branch."""
    flow: Any = node.kwargs["flow"]

    def run(body: RankGraph, given: list[list[Tensor]]) -> list[list[Tensor]]:
        return run_lockstep(body.graph, mesh, given, {})

    if isinstance(flow, Cond):
        results = run(flow.if_true if _decided(node, columns[0]) else flow.if_false, columns[1:])
    elif isinstance(flow, Scan):
        results = _run_scan(flow, columns, run)
    else:
        carries, captured = columns[: flow.num_carries], columns[flow.num_carries :]
        while _decided(node, run(flow.test, [*carries, *captured])[0]):
            carries = run(flow.body, [*carries, *captured])
        results = carries
    return [list(rank) for rank in zip(*results, strict=True)]


def _run_scan(flow: Scan, columns: list[list[Tensor]], run: Callable[..., list[list[Tensor]]]) -> list[list[Tensor]]:
    carries, xs, captured = flow.operands(columns)
    turns: list[list[list[Tensor]]] = []
    order = range(flow.length)
    for turn in reversed(order) if flow.reverse else order:
        results = run(flow.body, [*carries, *([x[turn] for x in column] for column in xs), *captured])
        carries = results[: flow.num_carries]
        turns.append(results)
    stacked = turns[::-1] if flow.reverse else turns
    _, ys, sums = flow.parts(range(len(turns[0])))
    stacks = [[torch.stack(list(column)) for column in zip(*(turn[i] for turn in stacked), strict=True)] for i in ys]
    totals = [[sum(column[1:], column[0]) for column in zip(*(turn[i] for turn in turns), strict=True)] for i in sums]
    return [*carries, *stacks, *totals]


def _decided(node: fx.Node, predicates: list[Tensor]) -> bool:
    """The predicate, which all ranks must have alike."""
    values = {bool(predicate) for predicate in predicates}
    if len(values) > 1:
        raise ShardingError(f"the predicate of %{node.name} at {node.meta.get('line')} differs from rank to rank: {predicates}")
    return values.pop()


def _post(node: fx.Node, env: dict[fx.Node, list[Any]], mesh: Mesh) -> list[Any]:
    """The results of a posted collective on every rank, as they are after `arrived`."""
    out: list[Any] = [None] * mesh.size
    for group in mesh.groups(node.kwargs["axes"]):
        operands = [fx.node.map_arg(node.args, lambda n, rank=rank: env[n][rank]) for rank in group]
        params = {key: value for key, value in node.kwargs.items() if key not in ("axes", "size")}
        for rank, result in zip(group, combine(node.target.__name__, operands, **params), strict=True):
            out[rank] = result
    return out


def implementation(target: Callable) -> Callable:
    """The function that runs for an FX target: a primitive's implementation, or the torch op itself."""
    primitive = primitive_of(target)
    if primitive is None:
        return target
    assert primitive.impl is not None, f"primitive {primitive.name} has no implementation"
    return primitive.impl


def _call(fn: Callable, node: fx.Node, env: dict[fx.Node, list[Any]], rank: int) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n][rank])
    with torch.no_grad():
        return fn(*args, **kwargs)
