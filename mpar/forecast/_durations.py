"""Durations: seconds of each instruction and of each message on a hardware profile."""

from mpar.hardware import Hardware
from mpar.ir import Instruction, ProgramData, link, segment_time

__all__ = ["instruction_durations", "message_durations"]


def instruction_durations(program: ProgramData, hardware: Hardware, position: int | None = None) -> list[list[float]]:
    """Seconds of each instruction, per position along pp (or of one); posting a message and waiting for it take none: the message
    itself does."""
    cache = {name: segment_time(kind, program.mesh, hardware) if kind.source else 0.0 for name, kind in program.kinds.items()}
    parts = program.parts if position is None else [program.parts[position]]

    def seconds(step: Instruction) -> float:
        if step.op in ("offload", "fetch"):  # as if nothing overlapped with it: an upper bound
            return program.values[step.inputs[0]].bytes / hardware.host_bytes_per_s
        return cache[step.kind]

    return [[seconds(step) for step in part.instructions] for part in parts]


def message_durations(program: ProgramData, hardware: Hardware) -> dict[int, float]:
    """Seconds of each message."""
    out = {}
    stride = program.mesh.rank({"pp": 1}) if len(program.parts) > 1 else 0
    for position, part in enumerate(program.parts):
        for step in part.instructions:
            if step.op == "send":
                nodes = {position * stride // hardware.ranks_per_node, step.peer * stride // hardware.ranks_per_node}
                rate, latency = link(hardware, crosses=len(nodes) > 1)
                out[step.message] = latency + program.values[step.inputs[0]].bytes / rate
    return out
