"""Simulate: a rank graph on all ranks in lockstep, in one process; collectives are operations on lists. The main oracle."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpar.collectives import combine, fold
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.ops._primitive import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._lower import RankGraph
from mpar.spec import P

__all__ = ["assemble", "distribute", "implementation", "run_lockstep", "simulate_graph"]


def simulate_graph(ranked: RankGraph, args: Sequence[Tensor]) -> list[Tensor]:
    """Run `ranked` on global tensors: distribute them, run every rank, assemble the results.

    Raises ShardingError if ranks that should hold the same value do not, bit for bit.
    """
    columns = [distribute(arg, spec, ranked.mesh) for arg, spec in zip(args, ranked.in_specs, strict=True)]
    results = run_lockstep(ranked.graph, ranked.mesh, columns, ranked.logical.constants)
    return [assemble(column, spec, ranked.mesh) for column, spec in zip(results, ranked.out_specs, strict=True)]


def distribute(x: Tensor, spec: P, mesh: Mesh) -> list[Tensor]:
    """Every rank's shard of a global tensor; of a pending sum, the first coordinate has the value and the others zero."""
    shards = []
    for rank in range(mesh.size):
        local = x
        for dim, axes in enumerate(spec.dims):
            if mesh.axis_size(axes) > 1:
                local = local.chunk(mesh.axis_size(axes), dim)[mesh.index(rank, axes)]
        if mesh.index(rank, spec.partial):
            local = torch.zeros_like(local)
        shards.append(local.clone(memory_format=torch.contiguous_format))
    return shards


def assemble(locals_: Sequence[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """The global tensor of every rank's shard. Raises ShardingError if two ranks disagree on what they share."""
    summed = list(locals_)
    for group in mesh.groups(spec.partial) if spec.partial else ():
        total = fold([locals_[rank] for rank in group])
        for rank in group:
            summed[rank] = total
    shape = [n * mesh.axis_size(spec.dim(i)) for i, n in enumerate(summed[0].shape)]
    out = summed[0].new_empty(shape)
    owner: dict[tuple[int, ...], int] = {}
    for rank, local in enumerate(summed):
        place = tuple(mesh.index(rank, axes) for axes in spec.padded(local.ndim))
        window = out
        for dim, (index, n) in enumerate(zip(place, local.shape, strict=True)):
            window = window.narrow(dim, index * n, n)
        if place not in owner:
            owner[place] = rank
            window.copy_(local)
        elif not _same_bits(window, local):
            raise ShardingError(
                f"ranks {owner[place]} and {rank} hold different values of a tensor {tuple(shape)} placed by {spec} on {mesh},\n"
                "where they should hold the same: an op in the function is not deterministic, or the compiler is wrong."
            )
    return out


def run_lockstep(
    graph: fx.Graph, mesh: Mesh, columns: Sequence[Sequence[Tensor]], constants: Mapping[str, Tensor]
) -> list[list[Tensor]]:
    """Run `graph` on every rank; `columns` holds, per placeholder, each rank's value. Results likewise."""
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
        elif node.target in collectives.COLLECTIVES:
            axes = node.kwargs["axes"]
            how = {key: value for key, value in node.kwargs.items() if key not in ("axes", "size")}
            if axes not in groups:
                groups[axes] = list(mesh.groups(axes))
            out: list[Any] = [None] * mesh.size
            for group in groups[axes]:
                parts = [env[node.args[0]][rank] for rank in group]
                for rank, result in zip(group, combine(node.target.__name__, parts, **how), strict=True):
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


def implementation(target: Callable, platform: str = "cpu") -> Callable:
    """The function that runs for an FX target: a primitive's kernel, or the torch op itself."""
    primitive = primitive_of(target)
    return target if primitive is None else primitive.kernel(platform)


def _call(fn: Callable, node: fx.Node, env: dict[fx.Node, list[Any]], rank: int) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n][rank])
    with torch.no_grad():
        return fn(*args, **kwargs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
