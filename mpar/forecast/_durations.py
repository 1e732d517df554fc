"""Durations: the seconds that each instruction and each message takes by a hardware profile."""

from mpar.hardware import Hardware
from mpar.ir import Instruction, ProgramData, link, segment_time

__all__ = ["instruction_durations", "message_durations"]


def instruction_durations(program: ProgramData, hardware: Hardware) -> list[list[float]]:
    """Seconds of each instruction, for every position along pp. To post a message or to wait for it takes no time by
    itself; the message does, see `message_durations`."""
    cache = {name: segment_time(kind, program.mesh, hardware) if kind.source else 0.0 for name, kind in program.kinds.items()}

    def seconds(instruction: Instruction) -> float:
        if instruction.op in ("offload", "fetch"):
            return program.values[instruction.inputs[0]].bytes / hardware.host_bytes_per_s
        return cache[instruction.kind]

    return [[seconds(instruction) for instruction in part.instructions] for part in program.parts]


def message_durations(program: ProgramData, hardware: Hardware) -> dict[int, float]:
    """Seconds of each message."""
    out = {}
    stride = program.mesh.rank({"pp": 1}) if len(program.parts) > 1 else 0
    for position, part in enumerate(program.parts):
        for instruction in part.instructions:
            if instruction.op == "send":
                nodes = {end * stride // hardware.ranks_per_node for end in (position, instruction.peer)}
                rate, latency = link(hardware, crosses=len(nodes) > 1)
                out[instruction.message] = latency + program.values[instruction.inputs[0]].bytes / rate
    return out
