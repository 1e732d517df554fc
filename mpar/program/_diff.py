"""Diff: what another configuration changes in a program, instruction by instruction. The numbers of values do not matter."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from mpar.ir import Instruction
from mpar.program._program import Program
from mpar.program._text import format_bytes

__all__ = ["Hunk", "ProgramDiff", "diff"]


@dataclass(frozen=True)
class Hunk:
    """Lines that differ at one position along pp, with equal lines around them.

    before, after: the line with which it begins in the first and in the second program.
    lines:         as in a unified diff: the first character of each is " ", "-" or "+".
    """

    position: int
    before: int
    after: int
    lines: tuple[str, ...]

    def text(self) -> str:
        """The hunk under its heading."""
        return "\n".join([f"@@ pp={self.position} line {self.before:04d} -> {self.after:04d} @@", *self.lines])


@dataclass(frozen=True)
class ProgramDiff:
    """The differences of two programs; pairs are (before, after).

    removed, added: numbers of instructions by op.
    collectives:    by (op, axes): pairs of (number, bytes), over all positions along pp, messages included.
    peak_bytes:     the peaks, of the rank with the highest.
    num_lines:      the numbers of instructions of all positions along pp.
    """

    removed: dict[str, int]
    added: dict[str, int]
    collectives: dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int]]]
    peak_bytes: tuple[int, int]
    num_lines: tuple[int, int]
    hunks: tuple[Hunk, ...]

    def summary(self) -> str:
        """The totals, one line each."""
        lines = [f"instructions   {self.num_lines[0]:,} -> {self.num_lines[1]:,}"]
        for op in sorted({*self.removed, *self.added}):
            lines.append(f"  {op:16} -{self.removed.get(op, 0):<6,} +{self.added.get(op, 0):,}")
        if any(before != after for before, after in self.collectives.values()):
            lines.append("communication of one rank of each position along pp")
        for (op, axes), (before, after) in sorted(self.collectives.items()):
            if before != after:
                shown = " -> ".join(f"{count:,} ({format_bytes(size)})" for count, size in (before, after))
                lines.append(f"  {f'{op} {axes}':26} {shown}")
        lines.append(f"peak memory    {format_bytes(self.peak_bytes[0])} -> {format_bytes(self.peak_bytes[1])}")
        return "\n".join(lines)

    def text(self, most: int | None = None) -> str:
        """The summary, then the hunks, or their first `most` lines."""
        body = [line for hunk in self.hunks for line in hunk.text().splitlines()]
        if most is not None and len(body) > most:
            body = [*body[:most], f"     ... {len(body) - most:,} more lines of {len(self.hunks):,} hunks"]
        return "\n".join([self.summary(), *([""] if body else []), *body])


def diff(before: Program, after: Program, *, context: int = 2) -> ProgramDiff:
    """What has to change in `before` to become `after`, position by position along pp, with `context` equal lines around.

    Two instructions are equal if they have the same op, segment, microbatch and queue, the same collectives, and as many bytes
    made and freed. A position along pp that one program does not have counts as one without instructions.
    """
    hunks: list[Hunk] = []
    removed: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for position in range(max(len(before.parts), len(after.parts))):
        old, new = (_lines_of(program, position) for program in (before, after))
        old_lines, new_lines = ([line for _, line in side] for side in (old, new))
        matcher = SequenceMatcher(None, old_lines, new_lines, autojunk=False)
        for group in matcher.get_grouped_opcodes(context):
            lines: list[str] = []
            for tag, i1, i2, j1, j2 in group:
                if tag == "equal":
                    lines += [f" {line}" for line in old_lines[i1:i2]]
                    continue
                lines += [f"-{line}" for line in old_lines[i1:i2]] + [f"+{line}" for line in new_lines[j1:j2]]
                removed.update(instruction.op for instruction, _ in old[i1:i2])
                added.update(instruction.op for instruction, _ in new[j1:j2])
            hunks.append(Hunk(position, group[0][1], group[0][3], tuple(lines)))
    counts = [_communication(program) for program in (before, after)]
    return ProgramDiff(
        dict(removed),
        dict(added),
        {key: (counts[0].get(key, (0, 0)), counts[1].get(key, (0, 0))) for key in {*counts[0], *counts[1]}},
        (before.predict().peak_bytes, after.predict().peak_bytes),
        (len(before.instructions), len(after.instructions)),
        tuple(hunks),
    )


def _lines_of(program: Program, position: int) -> list[tuple[Instruction, str]]:
    if position >= len(program.parts):
        return []
    return [(instruction, _line(program, instruction)) for instruction in program.parts[position].instructions]


def _line(program: Program, instruction: Instruction) -> str:
    """What an instruction does, without the names of its values and the numbers of messages."""
    words = instruction.words
    if instruction.message >= 0:
        words += f" {instruction.queue[-1]} pp={instruction.peer}" if instruction.op != "wait" else f" pp={instruction.peer}"
    parts = [f"{instruction.queue:8} {words}"]
    uses = [f"{op} {axes} {format_bytes(size)}" for op, axes, size in _uses(program, instruction)]
    if uses:
        parts.append("; ".join(uses))
    made, freed = (sum(program.values[v].bytes for v in values) for values in (instruction.outputs, instruction.frees))
    parts += [f"makes {format_bytes(made)}"] * bool(made) + [f"frees {format_bytes(freed)}"] * bool(freed)
    return "   ".join(parts)


def _uses(program: Program, instruction: Instruction) -> Iterator[tuple[str, str, int]]:
    """(op, axes, bytes that a rank contributes) of each collective of an instruction, and of the message that it sends."""
    for use in program.kinds[instruction.kind].collectives:
        yield use.op, "x".join(use.axes), use.bytes
    if instruction.op == "send":
        yield "send", "pp", program.values[instruction.inputs[0]].bytes


def _communication(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """By (op, axes): the number of collectives or messages, and their bytes."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for instruction in program.instructions:
        for op, axes, size in _uses(program, instruction):
            count, total = totals.get((op, axes), (0, 0))
            totals[op, axes] = count + 1, total + size
    return totals
