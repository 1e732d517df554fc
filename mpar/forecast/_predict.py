"""Predict: the peak bytes of a step exactly, its FLOPs and communication, and its time by a hardware profile."""

import itertools
from dataclasses import asdict, dataclass

from mpar.forecast._durations import instruction_durations, message_durations
from mpar.forecast._memory import host_bytes, memory_timeline, pools, timeline
from mpar.forecast._times import StepTimes, step_times
from mpar.hardware import Hardware
from mpar.ir import ProgramData, collective_time, exposed_time

__all__ = ["Prediction", "predict", "predicted_times"]


@dataclass(frozen=True)
class Prediction:
    """What one step of one rank costs. Of bytes and counts, the largest of any rank.

    peak_bytes:          the peak, exact except for the workspace inside ops. workspace_bytes: the largest workspace of an op.
    need_bytes:          the peak with the workspace of every op included while it runs.
    bytes_if_rows_meet:  the same if a router sends all rows to one rank, which needs more only if rows travel between ranks.
    reserved_bytes:      on a GPU, where a stream keeps what it has freed: the peaks of all streams, without workspaces.
    host_bytes:          the most that is in the memory of the host at one time. state_bytes: what is held between steps.
    flops:               FLOPs that are executed, recomputation included.
    communication_bytes: what a rank contributes to collectives and sends to other stages.
    step_s:              the makespan of all ranks. Of the busiest rank:
    compute_s:           the time that it computes. communication_s: what its collectives take, hidden or not.
    exposed_s:           the time that its computation waits for its other queues, which communicate, and copy to its host.
    bubble_s:            the rest of the step, in which it waits for other ranks: compute_s + exposed_s + bubble_s is step_s.
    span_bubble_s:       the longest time that a rank idles between its first forward and its last backward.
    """

    peak_bytes: int
    state_bytes: int
    workspace_bytes: int
    need_bytes: int
    bytes_if_rows_meet: int
    reserved_bytes: int
    host_bytes: int
    flops: int
    communication_bytes: int
    num_collectives: int
    num_messages: int
    step_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_s: float | None = None
    bubble_s: float | None = None
    span_bubble_s: float | None = None

    def as_dict(self) -> dict[str, int | float | None]:
        """The fields by name, for JSON."""
        return asdict(self)


def predict(program: ProgramData, hardware: Hardware | None = None) -> Prediction:
    """Memory, FLOPs and communication of a step, each the largest of any rank; times too if a hardware profile is given."""
    parts = [_predict_part(program, position) for position in range(len(program.parts))]
    largest = {name: max(getattr(part, name) for part in parts) for name in _COUNTS}
    if hardware is None:
        return Prediction(**largest)
    times = predicted_times(program, hardware)
    busiest = max(range(len(parts)), key=times.occupied)
    kinds = [program.kinds[instruction.kind] for instruction in program.parts[busiest].instructions]
    computing = itertools.compress(kinds, times.at_home[busiest])
    inside = sum(exposed_time(kind, program.mesh, hardware) for kind in computing)
    return Prediction(
        **largest,
        step_s=times.makespan,
        compute_s=times.busy[busiest] - inside,
        communication_s=sum(collective_time(program.mesh, use, hardware) for kind in kinds for use in kind.collectives),
        exposed_s=times.occupied(busiest) - times.busy[busiest] + inside,
        bubble_s=times.bubble,
        span_bubble_s=times.span_bubble,
    )


def predicted_times(program: ProgramData, hardware: Hardware) -> StepTimes:
    """When every instruction begins and ends on this hardware."""
    durations, messages = instruction_durations(program, hardware), message_durations(program, hardware)
    return step_times(program, durations, messages, overlaps=hardware.overlaps, contention=hardware.contention)


def _predict_part(program: ProgramData, position: int) -> Prediction:
    part = program.parts[position]
    levels = memory_timeline(program, position)
    kinds = [program.kinds[instruction.kind] for instruction in part.instructions]
    uses = [use for kind in kinds for use in kind.collectives]
    sent = [program.values[instruction.inputs[0]].bytes for instruction in part.instructions if instruction.op == "send"]
    state = sum({program.values[leaf.value].storage: program.values[leaf.value].bytes for leaf in part.state_in}.values())
    return Prediction(
        max((peak for peak, _ in levels), default=0),
        state,
        max((kind.workspace for kind in kinds), default=0),
        max((peak for peak, _ in timeline(program, part, workspace=True)), default=0),
        max((peak for peak, _ in timeline(program, part, workspace=True, all_rows=True)), default=0),
        sum(pools(program, part).values()),
        host_bytes(program, part),
        sum(kind.flops for kind in kinds),
        sum(use.bytes for use in uses) + sum(sent),
        len(uses),
        len(sent),
    )


_COUNTS = (
    "peak_bytes",
    "state_bytes",
    "workspace_bytes",
    "need_bytes",
    "bytes_if_rows_meet",
    "reserved_bytes",
    "host_bytes",
    "flops",
    "communication_bytes",
    "num_collectives",
    "num_messages",
)
