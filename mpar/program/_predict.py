"""Predict: peak bytes exactly, by sweeping storages; time per instruction from a hardware profile."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpar.program._memory import sweep

if TYPE_CHECKING:
    from mpar.program._program import CollectiveUse, Program

__all__ = ["Hardware", "Prediction", "instruction_times", "memory_timeline", "predict"]


@dataclass(frozen=True)
class Hardware:
    """What one device and its links do; rates are achieved ones, not of the data sheet.

    flops_per_s:       by dtype name ("float32", "bfloat16").
    memory_bytes_per_s, launch_s: bandwidth of device memory, fixed time of one segment.
    link_bytes_per_s, link_latency_s: one rank's share within a node; cross_*: between nodes of `ranks_per_node` ranks.
    memory_bytes:      of one device.
    """

    name: str
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    link_latency_s: float
    cross_bytes_per_s: float
    cross_latency_s: float
    ranks_per_node: int
    launch_s: float = 0.0
    peak_flops_per_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What one step of one rank costs.

    peak_bytes is exact but for the workspace inside single ops, of which `workspace_bytes` is the largest; state_bytes is what
    lives between steps. FLOPs count what is executed, recomputation included. communication_bytes is what one rank contributes.
    """

    peak_bytes: int
    state_bytes: int
    workspace_bytes: int
    flops: int
    communication_bytes: int
    num_collectives: int
    step_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def predict(program: "Program", hardware: Hardware | None = None) -> Prediction:
    """Peak memory, FLOPs and communication of one rank's step; times too if a hardware profile is given."""
    timeline = memory_timeline(program)
    kinds = [program.kinds[step.kind] for step in program.instructions]
    uses = [use for kind in kinds for use in kind.collectives]
    state = sum({program.values[leaf.value].storage: program.values[leaf.value].bytes for leaf in program.state_in}.values())
    times: dict[str, float | None] = {"step_s": None, "compute_s": None, "communication_s": None}
    if hardware is not None:
        communication = sum(_collective_time(program, use, hardware) for use in uses)
        total = sum(instruction_times(program, hardware))
        times = {"step_s": total, "compute_s": total - communication, "communication_s": communication}
    return Prediction(
        max((peak for peak, _ in timeline), default=0),
        state,
        max((kind.workspace for kind in kinds), default=0),
        sum(kind.flops for kind in kinds),
        sum(use.bytes for use in uses),
        len(uses),
        **times,
    )


def memory_timeline(program: "Program") -> list[tuple[int, int]]:
    """For each instruction (highest bytes while it runs, bytes after it), state, batch and constants included."""
    return list(_timeline(program))


def _timeline(program: "Program") -> Iterator[tuple[int, int]]:
    values = program.values
    users: dict[int, int] = {}  # live values of each storage
    sizes: dict[int, int] = {}

    def hold(value: int, size: int) -> None:
        storage = values[value].storage
        users[storage] = users.get(storage, 0) + 1
        sizes[storage] = max(sizes.get(storage, 0), size)

    batch_storages: dict[int, int] = {}
    for leaf in program.batch:
        storage = values[leaf.value].storage
        batch_storages[storage] = batch_storages.get(storage, 0) + values[leaf.value].bytes
    for leaf in program.reads():
        hold(leaf.value, batch_storages.get(values[leaf.value].storage, values[leaf.value].bytes))
    constants = sum(t.nbytes for kind in program.kinds.values() for t in kind.constants.values())
    live = constants + sum(sizes[storage] for storage in users)
    for step in program.instructions:
        memory = program.kinds[step.kind].memory
        frees = set(step.frees)
        gone = {values[v].storage: 0 for v in frees}
        for v in frees:
            gone[values[v].storage] += 1
        last = {storage for storage, count in gone.items() if users.get(storage, 0) == count}
        donated = frozenset(local for local, v in zip(memory.inputs, step.inputs, strict=True) if values[v].storage in last)
        peak = live + sweep(memory, donated)
        for local, v in zip(memory.outputs, step.outputs, strict=True):
            if values[v].storage not in users:
                live += memory.sizes[local]
            hold(v, memory.sizes[local])
        peak = max(peak, live - sum(sizes[s] for s in last if s in users and s not in {values[v].storage for v in step.outputs}))
        for v in frees:
            storage = values[v].storage
            users[storage] -= 1
            if not users[storage]:
                del users[storage]
                live -= sizes.pop(storage)
        yield max(peak, live), live


def instruction_times(program: "Program", hardware: Hardware) -> list[float]:
    """Seconds of each instruction: the larger of arithmetic and memory traffic, then its collectives, one after the other."""
    cache: dict[str, float] = {}
    for name, kind in program.kinds.items():
        rate = hardware.flops_per_s.get(_dtype_name(program, name), max(hardware.flops_per_s.values()))
        local = max(kind.flops / rate, kind.bytes / hardware.memory_bytes_per_s) + hardware.launch_s
        cache[name] = local + sum(_collective_time(program, use, hardware) for use in kind.collectives)
    return [cache[step.kind] for step in program.instructions]


def _dtype_name(program: "Program", kind: str) -> str:
    step = next(s for s in program.instructions if s.kind == kind)
    dtypes = [program.values[v].dtype for v in step.inputs if program.values[v].dtype.is_floating_point]
    narrow = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    return str(narrow).removeprefix("torch.")


def _collective_time(program: "Program", use: "CollectiveUse", hardware: Hardware) -> float:
    """Ring costs: (n - 1) / n of the whole message through one rank's link; twice that for an all_reduce."""
    crosses = _crosses_nodes(program, use.axes, hardware.ranks_per_node)
    rate, latency = (
        (hardware.cross_bytes_per_s, hardware.cross_latency_s)
        if crosses
        else (hardware.link_bytes_per_s, hardware.link_latency_s)
    )
    n = use.size
    whole = use.bytes * n if use.op == "all_gather" else use.bytes
    passes = 2 if use.op == "all_reduce" else 1
    return latency + passes * whole * (n - 1) / n / rate


def _crosses_nodes(program: "Program", axes: tuple[str, ...], ranks_per_node: int) -> bool:
    mesh = program.mesh
    first = {axis: mesh.axis_size(axis) - 1 for axis in axes}
    return mesh.rank(first) // ranks_per_node > 0
