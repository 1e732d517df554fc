"""Says in words how sequences and experts are spread over ranks, for `mpar plan`, and warns of groups that use slow links."""

import itertools
import math
from dataclasses import replace

from mpar.arrange import arrange, sequence_order
from mpar.mesh import Mesh
from mpar.models import DeclaredModel, MoeConfig, Trainable
from mpar.program import Hardware, Program
from mpar.strategy import Strategy, dim_sizes

__all__ = ["placement", "slow_axes"]

_WAITING = {"tp": "every layer", "cp": "every attention"}
"""Mesh axes whose ranks communicate often, and what waits for this."""


def placement(model: Trainable, strategy: Strategy, program: Program, rank: int) -> list[str]:
    """Lines on the sequence, if ranks share it, on the experts, if the model has any, and on storage rules without effect."""
    mesh, chosen = program.facts.mesh, program.facts.context_parallel
    by_time = ", by predicted time" if strategy.context_parallel == "auto" else ""
    if by_time and program.facts.refused:
        by_time += f" among those that are possible (not {', '.join(program.facts.refused)})"
    strategy = replace(strategy, context_parallel=chosen or strategy.context_parallel)
    strategy, mesh = arrange(strategy, mesh, model.abstract_params, model.param_axes)
    sizes = dim_sizes(model.abstract_params, model.param_axes)
    lines = _sequence(strategy, mesh, program, rank, _method(model, strategy, mesh) + by_time)
    if "expert" not in sizes:
        return lines
    first, *further = _experts(strategy, mesh, sizes["expert"], rank)
    return [*lines, first + _capacity(model, strategy, mesh, program.facts.batch["tokens"]), *further]


def slow_axes(strategy: Strategy, mesh: Mesh, model: Trainable, hardware: Hardware) -> list[str]:
    """A warning for each group of ranks that communicates often and is not within one node of `hardware`, and for each axis whose
    ranks hold different experts and do the same work otherwise.
    """
    arranged, refined = arrange(strategy, mesh, model.abstract_params, model.param_axes)
    groups: dict[str, tuple[Mesh, tuple[str, ...], str]] = {axis: (mesh, (axis,), waiting) for axis, waiting in _WAITING.items()}
    axes = refined.ordered(set(arranged.compute["expert"]))
    if axes and "expert" in dim_sizes(model.abstract_params, model.param_axes):
        groups["expert_parallel"] = (refined, axes, "every layer of experts")
    warnings = []
    node = hardware.ranks_per_node
    for name, (group_mesh, group_axes, waiting) in groups.items():
        if group_mesh.rank({axis: group_mesh.axis_size(axis) - 1 for axis in group_axes}) >= node:
            warnings.append(
                f"{name} of {group_mesh.axis_size(group_axes)} ranks crosses nodes, of {node} ranks each on {hardware.name}: "
                f"{waiting} waits for links between nodes"
            )
    rules = {axis for name, axes in arranged.compute.items() if name not in ("expert", "expert_mlp") for axis in axes}
    warnings += [
        f"ranks along {axis} hold different experts and do the same work otherwise: strategy {strategy.name} has no other rule "
        f"for {axis}; use one that has, or give these ranks to another axis of the mesh"
        for axis in arranged.compute["expert"]
        if axis not in rules and refined.axis_size(axis) > 1
    ]
    return warnings


def _sequence(strategy: Strategy, mesh: Mesh, program: Program, rank: int, method: str) -> list[str]:
    axes = mesh.ordered(set(strategy.compute["seq"]))
    if not axes:
        return []
    length, ranks = program.facts.batch["tokens"][1] // program.num_slices, mesh.axis_size(axes)
    num_local = length // ranks
    start = mesh.index(rank, axes) * num_local
    places = sequence_order(length, program.order_parts)[start : start + num_local]
    ends = [-1, *(places.diff() != 1).nonzero().flatten().tolist(), num_local - 1]
    runs = [f"{places[a + 1]:,} to {places[b]:,}" for a, b in itertools.pairwise(ends)]
    how = "zigzag: " if program.order_parts > 1 else ""
    each, first = (" of each slice", " of the first") if program.num_slices > 1 else ("", "")
    return [
        f"sequence    over {' x '.join(axes)}, {ranks} ranks; {method}; "
        f"rank {rank} has {num_local:,} positions{each}, {how}{' and '.join(runs)}{first}"
    ]


def _method(model: Trainable, strategy: Strategy, mesh: Mesh) -> str:
    """How layers see all positions of a sequence, told by where the strategy puts queries and keys."""
    ranks, queries, keys = (mesh.axis_size(strategy.compute[row]) for row in ("seq", "attend_seq", "attend_kv_seq"))
    if queries == 1:
        return "all_to_all: each rank has some heads of all positions"
    if model.sequential:
        return "gathered for layers that scan it"
    if queries < ranks:
        return f"all_to_all among {ranks // queries}, {'ring' if keys > 1 else 'all_gather'} between {queries}"
    return "ring" if keys > 1 else "all_gather"


def _capacity(model: Trainable, strategy: Strategy, mesh: Mesh, tokens: tuple[int, int]) -> str:
    """How many rows an expert takes from which group of tokens, and a note where one group is on several ranks."""
    layers = model.config.layers if isinstance(model, DeclaredModel) else ()
    layer = next((layer.mlp for layer in layers if isinstance(layer.mlp, MoeConfig)), None)
    if layer is None or layer.capacity_factor is None:
        return ""
    groups = layer.token_groups
    rows, positions = (size // count for size, count in zip(tokens, groups, strict=True))
    each = f"each of {groups[0]} x {groups[1]} groups of {rows} x {positions:,} tokens"
    of = "a microbatch" if groups == (1, 1) else each
    text = f"; up to {layer.capacity(rows * positions):,} rows of {of}" + (", padded to as many" if layer.padded else "")
    shards = [mesh.axis_size(strategy.compute[row]) for row in ("moe_batch", "moe_seq")]
    if layer.padded and any(count % ranks for count, ranks in zip(groups, shards, strict=True)):
        text += f" (tokens are gathered: a group spans several of the {shards[0]} x {shards[1]} parts that different ranks have)"
    return text


def _experts(strategy: Strategy, mesh: Mesh, num_experts: int, rank: int) -> list[str]:
    axes = mesh.ordered(set(strategy.compute["expert"]))
    inner = mesh.ordered(set(strategy.compute["expert_mlp"]))
    shared = f", inside over {' x '.join(inner)}" if inner else ""
    if not axes:
        return [f"experts     {num_experts}, all on every rank{shared}"]
    num_held = num_experts // mesh.axis_size(axes)
    first = mesh.index(rank, axes) * num_held
    held = f"{first} to {first + num_held - 1}" if num_held > 1 else f"{first}"
    lines = [
        f"experts     {num_experts} over {' x '.join(axes)}, {mesh.axis_size(axes)} ranks{shared}; rank {rank} has {held}; "
        f"tokens go there by {strategy.dispatcher}"
    ]
    tables = (strategy.param_storage, strategy.grad_storage, strategy.opt_storage)
    rules = {axis for table in tables for rule_axes in table.values() for axis in rule_axes}
    unused = [axis for axis in axes if axis in rules]
    if unused:
        remaining_axes = [axis for axis in mesh.ordered(rules) if axis not in axes]
        num_sharing = math.prod(mesh.axis_size(axis) for axis in remaining_axes)
        sharing = f"shared by {num_sharing} ranks of {' x '.join(remaining_axes)}" if remaining_axes else "not shared"
        lines.append(f"storage     of an expert is {sharing}: {' x '.join(unused)} shards by experts already")
    return lines
