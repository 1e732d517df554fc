"""Passes over the instructions of a part: they move sends across segments, and free values."""

from collections.abc import Sequence
from dataclasses import replace

from mpar.ir import Instruction

__all__ = ["advance_sends", "insert_frees"]


def advance_sends(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Move each send right behind the instruction that makes its value, so that reductions and sums run while it travels.

    before:  dx3, dw = backward (...); g = reduce (dw); send dx3
    after:   dx3, dw = backward (...); send dx3; g = reduce (dw)

    Sends to one position keep their order. Sends of gradients of shared parameters stay at the end of the step, where their
    receivers expect them.
    """
    maker = {v: line for line, instruction in enumerate(instructions) for v in instruction.outputs}
    received = {instruction.message for instruction in instructions if instruction.op == "recv"}
    maker |= {
        instruction.inputs[0]: line
        for line, instruction in enumerate(instructions)
        if instruction.op == "wait" and instruction.message in received
    }
    sends: dict[int, list[Instruction]] = {}
    last: dict[int, int] = {}  # for each peer, the line behind which the latest send to it goes
    for instruction in instructions:
        if _travels_early(instruction):
            last[instruction.peer] = max(maker[instruction.inputs[0]], last.get(instruction.peer, 0))
            sends.setdefault(last[instruction.peer], []).append(instruction)
    return [
        s
        for line, instruction in enumerate(instructions)
        if not _travels_early(instruction)
        for s in (instruction, *sends.get(line, ()))
    ]


def _travels_early(instruction: Instruction) -> bool:
    """Whether an instruction is a send of the pipeline; sends of gradients of shared parameters belong to no microbatch."""
    return instruction.op == "send" and instruction.microbatch >= 0


def insert_frees(instructions: Sequence[Instruction], keep: set[int]) -> list[Instruction]:
    """Free every value, except those in `keep`, in the last instruction that reads it, or in its maker if nothing reads it.

    before:  x1 = forward 0 (w0); x2 = forward 1 (x1)
    after:   x1 = forward 0 (w0) free w0; x2 = forward 1 (x1) free x1
    """
    seen = set(keep)
    out = []
    for instruction in reversed(instructions):
        frees = tuple(v for v in dict.fromkeys((*instruction.inputs, *instruction.outputs)) if v not in seen)
        seen.update(frees)
        out.append(replace(instruction, frees=frees))
    return out[::-1]
