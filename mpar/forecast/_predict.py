"""Predict: peak bytes exactly, by sweeping storages; time per instruction from a hardware profile."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpar.mesh import Mesh
from mpar.ir._memory import sweep
from mpar.forecast._times import step_times

if TYPE_CHECKING:
    from mpar.program._program import CollectiveUse, Instruction, Kind, Part, Program

__all__ = [
    "REFERENCE",
    "Hardware",
    "Prediction",
    "instruction_durations",
    "memory_timeline",
    "message_durations",
    "predict",
    "segment_time",
]


@dataclass(frozen=True)
class Hardware:
    """What one device and its links do; rates are achieved ones, not of the data sheet.

    flops_per_s:       by dtype name ("float32", "bfloat16").
    memory_bytes_per_s, launch_s: bandwidth of device memory, fixed time of one segment.
    host_bytes_per_s:  between a device and the memory of its host.
    link_bytes_per_s, link_latency_s: one rank's share within a node; cross_*: between nodes of `ranks_per_node` ranks.
    memory_bytes:      of one device.
    arch:              its chip, for which kernels are chosen, such as "sm_90"; None is a CPU.
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
    arch: str | None = None
    host_bytes_per_s: float = 5e10


@dataclass(frozen=True)
class Prediction:
    """What one step of one rank costs.

    peak_bytes is exact but for the workspace inside single ops, of which `workspace_bytes` is the largest; need_bytes is the peak
    with each workspace where it is needed and while it is; most_bytes is that where a router sends all rows to one rank, which is
    more only if rows travel between ranks. host_bytes is the most that waits in the memory of the host, state_bytes what lives
    between steps. FLOPs count what is executed, recomputation included. communication_bytes is what one rank contributes to
    collectives and sends to other stages. Counts are the most of any rank. step_s is the makespan of all ranks; compute_s and
    communication_s are the busiest one's; the bubble is
    the makespan without its time, the span bubble the longest time that a rank idles between its first forward and its last
    backward.
    """

    peak_bytes: int
    state_bytes: int
    workspace_bytes: int
    need_bytes: int
    most_bytes: int
    host_bytes: int
    flops: int
    communication_bytes: int
    num_collectives: int
    num_messages: int
    step_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    bubble_s: float | None = None
    span_bubble_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def predict(program: "Program", hardware: Hardware | None = None) -> Prediction:
    """Peak memory, FLOPs and communication of a rank's step, the most of any; times too if a hardware profile is given."""
    parts = [_predict_part(program, position, hardware) for position in range(len(program.parts))]
    most = {name: max(getattr(part, name) for part in parts) for name in _COUNTS}
    if hardware is None:
        return Prediction(**most)
    times = step_times(program, instruction_durations(program, hardware), message_durations(program, hardware))
    busiest = max(parts, key=lambda part: (part.compute_s or 0.0) + (part.communication_s or 0.0))
    return Prediction(
        **most,
        step_s=times.makespan,
        compute_s=busiest.compute_s,
        communication_s=busiest.communication_s,
        bubble_s=times.bubble,
        span_bubble_s=times.span_bubble,
    )


def _predict_part(program: "Program", position: int, hardware: Hardware | None) -> Prediction:
    part = program.parts[position]
    timeline = memory_timeline(program, position)
    kinds = [program.kinds[step.kind] for step in part.instructions]
    uses = [use for kind in kinds for use in kind.collectives]
    sent = [program.values[step.inputs[0]].bytes for step in part.instructions if step.op == "send"]
    state = sum({program.values[leaf.value].storage: program.values[leaf.value].bytes for leaf in part.state_in}.values())
    times: dict[str, float | None] = {"compute_s": None, "communication_s": None}
    if hardware is not None:
        communication = sum(_collective_time(program.mesh, use, hardware) for use in uses)
        total = sum(instruction_durations(program, hardware, position)[0])
        times = {"compute_s": total - communication, "communication_s": communication}
    return Prediction(
        max((peak for peak, _ in timeline), default=0),
        state,
        max((kind.workspace for kind in kinds), default=0),
        max((peak for peak, _ in _timeline(program, part, workspace=True)), default=0),
        max((peak for peak, _ in _timeline(program, part, workspace=True, most=True)), default=0),
        _host_bytes(program, part),
        sum(kind.flops for kind in kinds),
        sum(use.bytes for use in uses) + sum(sent),
        len(uses),
        len(sent),
        **times,
    )


def _host_bytes(program: "Program", part: "Part") -> int:
    """The most bytes that are in the memory of the host at once."""
    now = most = 0
    there: set[int] = set()
    for step in part.instructions:
        if step.op == "offload":
            there.add(step.outputs[0])
            now += program.values[step.outputs[0]].bytes
        most = max(most, now)
        now -= sum(program.values[v].bytes for v in step.frees if v in there)
    return most


def memory_timeline(program: "Program", position: int = 0) -> list[tuple[int, int]]:
    """For each instruction of one position along pp (highest bytes while it runs, bytes after it), state, batch, constants and
    what messages hold included."""
    return list(_timeline(program, program.parts[position]))


def _timeline(program: "Program", part: "Part", *, workspace: bool = False, most: bool = False) -> Iterator[tuple[int, int]]:
    values = program.values
    users: dict[int, int] = {}  # live values of each storage
    sizes: dict[int, int] = {}

    def hold(value: int, size: int) -> None:
        storage = values[value].storage
        users[storage] = users.get(storage, 0) + 1
        sizes[storage] = max(sizes.get(storage, 0), size)

    batch_storages: dict[int, int] = {}
    for leaf in part.batch:
        storage = values[leaf.value].storage
        batch_storages[storage] = batch_storages.get(storage, 0) + values[leaf.value].bytes
    for leaf in part.reads():
        hold(leaf.value, batch_storages.get(values[leaf.value].storage, values[leaf.value].bytes))
    used = {step.kind for step in part.instructions}
    constants = sum(t.nbytes for name in used for t in program.kinds[name].constants.values())
    live = constants + sum(sizes[storage] for storage in users)
    for step in part.instructions:
        kind = program.kinds[step.kind]
        memory = kind.most if most and kind.most is not None else kind.memory
        frees = set(step.frees)
        gone = {values[v].storage: 0 for v in frees}
        for v in frees:
            gone[values[v].storage] += 1
        last = {storage for storage, count in gone.items() if users.get(storage, 0) == count}
        donated = frozenset(local for local, v in zip(memory.inputs, step.inputs, strict=True) if values[v].storage in last)
        peak = live + sweep(memory, donated, workspace=workspace)
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


def segment_time(kind: "Kind", mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of a segment: the larger of arithmetic and memory traffic, then what of its collectives nothing hides."""
    dtypes = (dtype for _, dtype in kind.operands if dtype.is_floating_point)
    narrow = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    rate = hardware.flops_per_s.get(str(narrow).removeprefix("torch."), max(hardware.flops_per_s.values()))
    local = max(kind.flops / rate, kind.bytes / hardware.memory_bytes_per_s) + hardware.launch_s
    return local + sum(_exposed_time(mesh, use, hardware, rate) for use in kind.collectives)


def _exposed_time(mesh: Mesh, use: "CollectiveUse", hardware: Hardware, rate: float) -> float:
    """Seconds of a collective that nothing hides."""
    hidden = max(use.hidden_flops / rate, use.hidden_bytes / hardware.memory_bytes_per_s)
    return max(0.0, _collective_time(mesh, use, hardware) - hidden)


def instruction_durations(program: "Program", hardware: Hardware, position: int | None = None) -> list[list[float]]:
    """Seconds of each instruction, per position along pp (or of one); posting a message and waiting for it take none: the message
    itself does."""
    cache = {name: segment_time(kind, program.mesh, hardware) if kind.source else 0.0 for name, kind in program.kinds.items()}
    parts = program.parts if position is None else [program.parts[position]]

    def seconds(step: "Instruction") -> float:
        if step.op in ("offload", "fetch"):  # as if nothing overlapped with it: an upper bound
            return program.values[step.inputs[0]].bytes / hardware.host_bytes_per_s
        return cache[step.kind]

    return [[seconds(step) for step in part.instructions] for part in parts]


def message_durations(program: "Program", hardware: Hardware) -> dict[int, float]:
    """Seconds of each message."""
    out = {}
    stride = program.mesh.rank({"pp": 1}) if len(program.parts) > 1 else 0
    for position, part in enumerate(program.parts):
        for step in part.instructions:
            if step.op == "send":
                nodes = {position * stride // hardware.ranks_per_node, step.peer * stride // hardware.ranks_per_node}
                rate, latency = _link(hardware, crosses=len(nodes) > 1)
                out[step.message] = latency + program.values[step.inputs[0]].bytes / rate
    return out


def _collective_time(mesh: Mesh, use: "CollectiveUse", hardware: Hardware) -> float:
    """Ring costs: (n - 1) / n of the whole message through one rank's link; twice that for an all_reduce."""
    rate, latency = _link(hardware, crosses=_crosses_nodes(mesh, use.axes, hardware.ranks_per_node))
    n = use.size
    if use.op == "shift":
        return latency + use.bytes / rate
    whole = use.bytes * n if use.op == "all_gather" else use.bytes
    passes = 2 if use.op == "all_reduce" else 1
    return latency + passes * whole * (n - 1) / n / rate


def _crosses_nodes(mesh: Mesh, axes: tuple[str, ...], ranks_per_node: int) -> bool:
    first = {axis: mesh.axis_size(axis) - 1 for axis in axes}
    return mesh.rank(first) // ranks_per_node > 0


def _link(hardware: Hardware, *, crosses: bool) -> tuple[float, float]:
    """(bytes per second, latency) within a node or between nodes."""
    if crosses:
        return hardware.cross_bytes_per_s, hardware.cross_latency_s
    return hardware.link_bytes_per_s, hardware.link_latency_s


_COUNTS = (
    "peak_bytes",
    "state_bytes",
    "workspace_bytes",
    "need_bytes",
    "most_bytes",
    "host_bytes",
    "flops",
    "communication_bytes",
    "num_collectives",
    "num_messages",
)

REFERENCE = Hardware(
    name="reference",
    flops_per_s={"float32": 5e13, "bfloat16": 5e14},
    memory_bytes_per_s=2.5e12,
    memory_bytes=80 * 2**30,
    link_bytes_per_s=2e11,
    link_latency_s=5e-6,
    cross_bytes_per_s=4e10,
    cross_latency_s=1e-5,
    ranks_per_node=8,
    launch_s=2e-6,
)
"""Round numbers of a typical accelerator: what a schedule is made for unless a profile is given."""
