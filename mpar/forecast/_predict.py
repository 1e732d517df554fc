"""Predict: peak bytes exactly; FLOPs, communication, and the time of a step on a hardware profile."""

from dataclasses import asdict, dataclass

from mpar.forecast._durations import instruction_durations, message_durations
from mpar.forecast._memory import host_bytes, memory_timeline, timeline
from mpar.forecast._times import step_times
from mpar.hardware import Hardware
from mpar.ir import ProgramData, collective_time

__all__ = ["Prediction", "predict"]


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

    def as_dict(self) -> dict[str, int | float | None]:
        """For JSON."""
        return asdict(self)


def predict(program: ProgramData, hardware: Hardware | None = None) -> Prediction:
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


def _predict_part(program: ProgramData, position: int, hardware: Hardware | None) -> Prediction:
    part = program.parts[position]
    levels = memory_timeline(program, position)
    kinds = [program.kinds[instruction.kind] for instruction in part.instructions]
    uses = [use for kind in kinds for use in kind.collectives]
    sent = [program.values[instruction.inputs[0]].bytes for instruction in part.instructions if instruction.op == "send"]
    state = sum({program.values[leaf.value].storage: program.values[leaf.value].bytes for leaf in part.state_in}.values())
    times: dict[str, float | None] = {"compute_s": None, "communication_s": None}
    if hardware is not None:
        communication = sum(collective_time(program.mesh, use, hardware) for use in uses)
        total = sum(instruction_durations(program, hardware, position)[0])
        times = {"compute_s": total - communication, "communication_s": communication}
    return Prediction(
        max((peak for peak, _ in levels), default=0),
        state,
        max((kind.workspace for kind in kinds), default=0),
        max((peak for peak, _ in timeline(program, part, workspace=True)), default=0),
        max((peak for peak, _ in timeline(program, part, workspace=True, most=True)), default=0),
        host_bytes(program, part),
        sum(kind.flops for kind in kinds),
        sum(use.bytes for use in uses) + sum(sent),
        len(uses),
        len(sent),
        **times,
    )


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
