"""Join work: neighbouring instructions become one, in which the messages of each travel while the other computes.

Two kinds of neighbours are joined where that is predicted to save time: the work for both microbatches of a pair, which is the
same or a forward and a backward, and then up to four equal layers that follow one another, because a message at the end of an
instruction has nothing to hide behind.
"""

import itertools
from collections.abc import Callable, Sequence

from mpar.compiler.build._writer import Kinds
from mpar.compiler.segment import Target
from mpar.ir import Instruction, Member

__all__ = ["join_work"]

_JOINED = ("forward", "backward", "backward_input", "backward_weight")
_DOUBLINGS = 2  # of the number of layers in an instruction
_LAST = 2  # instructions of a part stay alone


def join_work(instructions: Sequence[Instruction], kinds: Kinds, target: Target, *, paired: bool) -> list[Instruction]:
    """Join what is done for two microbatches at a time if they are `paired`, then equal layers in a row.

    before:  x1.0 = forward layers.0 mb0 (x0.0, w); x1.1 = forward layers.0 mb1 (x0.1, w)
    after:   x1.0, x1.1 = forward layers.0 mb0 + forward layers.0 mb1 (x0.0, w, x0.1)

    The second moves up to the first, of a pair behind gathers of what it reads. It stays where it is if it reads anything else
    that is made between them; so do layers whose parameters are gathered one after the other, since these take memory. The last
    layers of a part stay alone: reductions of their gradients wait for them, and nothing hides those.
    """
    out = list(instructions)
    if target.hardware is None:
        return out
    if paired:
        out = _join(out, kinds, target, _is_of_one_round)
    for _ in range(_DOUBLINGS):
        out = _join(out, kinds, target, _is_equal_layer, last_alone=_LAST, over_gathers=False)
    return out


def _is_of_one_round(first: Instruction, second: Instruction) -> bool:
    """Whether these are the same for both microbatches of a pair, or the forward and the backward of two microbatches."""
    if first.op == "forward" and second.op == "backward":
        return first.microbatch != second.microbatch
    same = (first.op, first.segment, first.slice) == (second.op, second.segment, second.slice)
    return same and first.microbatch % 2 == 0 and second.microbatch == first.microbatch + 1


def _is_equal_layer(first: Instruction, second: Instruction) -> bool:
    return (first.op, first.kind, first.microbatch, first.slice) == (second.op, second.kind, second.microbatch, second.slice)


def _join(
    instructions: Sequence[Instruction],
    kinds: Kinds,
    target: Target,
    fits: Callable[[Instruction, Instruction], bool],
    *,
    last_alone: int = 0,
    over_gathers: bool = True,
) -> list[Instruction]:
    """Join each instruction with the next one of a segment, if they fit, but for the last ones.

    over_gathers: whether gathers between the two may move up.
    """
    lines = [line for line, instruction in enumerate(instructions) if instruction.op in _JOINED]
    out: dict[int, list[Instruction]] = {line: [instruction] for line, instruction in enumerate(instructions)}
    for line, other in itertools.pairwise(lines[: len(lines) - last_alone]):
        first, second, between = instructions[line], instructions[other], range(line + 1, other)
        if not out[line] or not fits(first, second):
            continue
        moved = _gathers_read(second, [instructions[i] for i in between])
        if moved is None or (moved and not over_gathers):
            continue
        joined = _joined(first, second, kinds, target)
        if joined is not None:
            out[line], out[other] = [*(instructions[line + 1 + i] for i in moved), joined], []
            out |= {line + 1 + i: [] for i in moved}
    return [instruction for line in sorted(out) for instruction in out[line]]


def _gathers_read(second: Instruction, between: Sequence[Instruction]) -> list[int] | None:
    """Which instructions of those `between` must run first if `second` moves up in front of them: gathers of parameters that it
    reads. None if it may not move, because others make what it reads."""
    gathers = [i for i, other in enumerate(between) if other.op == "gather" and set(other.outputs) & set(second.inputs)]
    ready_later = {
        v
        for i, other in enumerate(between)
        if i not in gathers
        for v in (*other.outputs, *(other.inputs if other.op == "wait" else ()))
    }
    needed = {v for i in gathers for v in between[i].inputs} | set(second.inputs)
    return None if ready_later & needed else gathers


def _joined(first: Instruction, second: Instruction, kinds: Kinds, target: Target) -> Instruction | None:
    """Both as one instruction; None if that is predicted to save no time."""
    made = {v: -1 - i for i, v in enumerate(first.outputs)}
    inputs = tuple(dict.fromkeys((*first.inputs, *(v for v in second.inputs if v not in made))))
    place = {v: i for i, v in enumerate(inputs)} | made
    kind = kinds.joined(first.kind, second.kind, tuple(place[v] for v in (*first.inputs, *second.inputs)), target)
    if kind is None:
        return None
    return Instruction(
        first.op,
        kind,
        inputs,
        first.outputs + second.outputs,
        segment=first.segment,
        microbatch=first.microbatch,
        slice=first.slice,
        members=_members(first) + _members(second),
    )


def _members(instruction: Instruction) -> tuple[Member, ...]:
    return instruction.members or (
        Member(
            instruction.op,
            instruction.inputs,
            instruction.outputs,
            instruction.segment,
            instruction.microbatch,
            instruction.slice,
        ),
    )
