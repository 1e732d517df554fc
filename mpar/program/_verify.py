"""Verify: what must hold of every program before it may run. Linear in the number of instructions."""

from collections import Counter
from typing import TYPE_CHECKING

from mpar.errors import ProgramError
from mpar.schedules import Event, check_order

if TYPE_CHECKING:
    from mpar.program._program import Instruction, Program, Value

__all__ = ["events", "verify"]


def verify(program: "Program", queues: str = "direction") -> None:
    """Raise ProgramError, naming rank and line, unless

    - every value is made once, read only while it lives and has arrived, and freed once, and nothing is left but results;
    - every instruction hands its segment values of the shapes and dtypes that it was compiled for;
    - every collective runs over axes of the mesh, with the size of their group;
    - messages have two ends that agree on shape and dtype and meet in order, and nobody waits for ever, under the model of
      queues that is named (see `mpar.schedules.check_order`);
    - every microbatch's contribution enters each stored gradient exactly once.

    Ranks that differ only along other axes than pp have one program, so they agree on every collective that does not cross pp:
    what holds of one rank for each position along pp holds of all.
    """
    for position in range(len(program.parts)):
        _check_lifetimes(program, position)
        _check_shapes(program, position)
    _check_collectives(program)
    _check_messages(program)
    check_order(events(program), queues=queues, describe=lambda rank, line: _what(program.parts[rank].instructions[line]))
    _check_contributions(program)


def _what(step: "Instruction") -> str:
    parts = (step.op, step.segment, f"mb{step.microbatch}" if step.microbatch >= 0 else "")
    return " ".join(part for part in parts if part) + (f" message {step.message}" if step.message >= 0 else "")


def _fail(program: "Program", position: int, line: int, step: "Instruction", why: str) -> None:
    where = f"pp={position} " if len(program.parts) > 1 else ""
    raise ProgramError(f"invalid program: {where}line {line:04d}, {_what(step)}: {why}")


def _check_lifetimes(program: "Program", position: int) -> None:
    names, part = program.values, program.parts[position]
    live = {leaf.value for leaf in part.reads()}
    made = set(live)
    freed: set[int] = set()
    posted: dict[int, int] = {}  # message that is on its way -> the value that it holds
    arriving: set[int] = set()
    leaving: Counter[int] = Counter()
    for line, step in enumerate(part.instructions):
        for v in step.inputs:
            if v not in live:
                state = "was freed" if v in freed else "nothing has made yet"
                _fail(program, position, line, step, f"reads {names[v].name}, which {state}")
            if v in arriving and step.op != "wait":
                _fail(program, position, line, step, f"reads {names[v].name}, whose message has not been waited for")
        for v in step.outputs:
            if v in made:
                _fail(program, position, line, step, f"makes {names[v].name} a second time")
            made.add(v)
            live.add(v)
        if step.op in ("send", "recv"):
            value = (step.inputs or step.outputs)[0]
            posted[step.message] = value
            leaving[value] += step.op == "send"
            arriving |= {value} if step.op == "recv" else set()
        elif step.op == "wait":
            if posted.pop(step.message, None) != step.inputs[0]:
                _fail(program, position, line, step, f"waits with {names[step.inputs[0]].name}, which its message does not hold")
            leaving[step.inputs[0]] -= step.inputs[0] not in arriving
            arriving.discard(step.inputs[0])
        for v in step.frees:
            if v not in live:
                state = "was freed before" if v in freed else "does not exist"
                _fail(program, position, line, step, f"frees {names[v].name}, which {state}")
            if v in arriving or leaving[v]:
                _fail(program, position, line, step, f"frees {names[v].name}, whose message has not been waited for")
            live.remove(v)
            freed.add(v)
    kept = {leaf.value for leaf in (*part.state_out, *part.metrics, *part.batch, *part.scalars)}
    missing, leaked = kept - live, live - kept
    if missing or leaked:
        raise ProgramError(
            f"invalid program: at its end {sorted(names[v].name for v in missing)} are missing and "
            f"{sorted(names[v].name for v in leaked)} were never freed"
        )


def _check_shapes(program: "Program", position: int) -> None:
    for line, step in enumerate(program.parts[position].instructions):
        kind = program.kinds[step.kind]
        for what, found, expected in (("operand", step.inputs, kind.operands), ("result", step.outputs, kind.results)):
            if len(found) != len(expected):
                why = f"has {len(found)} {what}s, its segment {kind.name!r} {len(expected)}"
                _fail(program, position, line, step, why)
            for v, (shape, dtype) in zip(found, expected, strict=True):
                value = program.values[v]
                if (value.shape, value.dtype) != (shape, dtype):
                    why = f"{what} {value.name} is {value.dtype} {value.shape}, its segment has {dtype} {shape}"
                    _fail(program, position, line, step, why)


def _check_collectives(program: "Program") -> None:
    for name, kind in program.kinds.items():
        for use in kind.collectives:
            unknown = [axis for axis in use.axes if axis not in program.mesh.axes]
            if unknown or program.mesh.axis_size(use.axes) != use.size:
                raise ProgramError(
                    f"invalid program: segment {name!r} has a {use.op} of {use.size} ranks over {use.axes} on {program.mesh}"
                )


def _check_messages(program: "Program") -> None:
    """Both ends of a message see the same shape and dtype."""
    ends: dict[int, tuple[int, int, Value]] = {}
    for position, part in enumerate(program.parts):
        for line, step in enumerate(part.instructions):
            if step.op in ("send", "recv"):
                value = program.values[(step.inputs or step.outputs)[0]]
                other = ends.setdefault(step.message, (position, line, value))
                if (other[2].shape, other[2].dtype) != (value.shape, value.dtype):
                    why = (
                        f"{value.name} is {value.dtype} {value.shape}; at the other end, pp={other[0]} line {other[1]:04d}, "
                        f"{other[2].name} is {other[2].dtype} {other[2].shape}"
                    )
                    _fail(program, position, line, step, why)


def events(program: "Program") -> list[list[Event]]:
    """Per position along pp what can make it wait for another: messages, and collectives that cross pp."""
    everybody = tuple(range(len(program.parts)))
    crossing = {
        name: tuple(use for use in kind.collectives if "pp" in use.axes)
        for name, kind in program.kinds.items()
        if len(program.parts) > 1
    }
    out: list[list[Event]] = []
    for part in program.parts:
        own = []
        for line, step in enumerate(part.instructions):
            if step.op in ("send", "recv", "wait"):
                own.append(Event(step.op, step.message, (step.peer,), line))
            else:
                own += [
                    Event("meet", (use.op, use.axes, use.size, use.tensors, use.bytes), everybody, line)
                    for use in crossing.get(step.kind, ())
                ]
        out.append(own)
    return out


def _check_contributions(program: "Program") -> None:
    """Follow what each gradient is the sum of: (use of the parameter, microbatch), from backward to update."""
    given = {v: item for part in program.parts for v, item in part.contributions.items()}
    parts: dict[int, Counter] = {v: Counter({(use, m): 1}) for v, (_, use, m) in given.items()}
    sent: dict[int, tuple[int, Counter | None]] = {}
    at = [0] * len(program.parts)
    moved = True
    while moved:  # in turn, as far as messages have arrived: there is an order, or `check_order` had refused
        moved = False
        for position, part in enumerate(program.parts):
            while at[position] < len(part.instructions):
                step = part.instructions[at[position]]
                if step.op == "send":
                    sent[step.message] = (step.inputs[0], parts.get(step.inputs[0]))
                elif step.op == "wait":
                    if step.message not in sent:
                        break
                    value, content = sent[step.message]
                    if value != step.inputs[0] and content is not None:
                        parts[step.inputs[0]] = content
                elif step.op in ("reduce", "accumulate"):
                    _follow(step, parts)
                at[position], moved = at[position] + 1, True
    uses: dict[str, set[tuple[str, int]]] = {}
    for path, use, m in given.values():
        uses.setdefault(path, set()).add((use, m))
    for part in program.parts:
        for path, value in part.gradients.items():
            _check_sum(path, parts.get(value, Counter()), uses.get(path, set()), program.num_microbatches)


def _follow(step: "Instruction", parts: dict[int, Counter]) -> None:
    if step.op == "reduce":
        parts |= {out: parts[v] for v, out in zip(step.inputs, step.outputs, strict=True) if v in parts}
        return
    n = len(step.outputs)
    for a, b, out in zip(step.inputs[:n], step.inputs[n:], step.outputs, strict=True):
        if a in parts or b in parts:
            parts[out] = parts.get(a, Counter()) + parts.get(b, Counter())


def _check_sum(path: str, found: Counter, given: set[tuple[str, int]], num_microbatches: int) -> None:
    segments = {use.rstrip("'") for use, _ in given}
    expected = Counter({(segment, m): 1 for segment in segments for m in range(num_microbatches)})
    merged: Counter = Counter()
    for (use, m), count in found.items():
        merged[use.rstrip("'"), m] += count
    if merged != expected:
        missing, extra = sorted((expected - merged).elements()), sorted((merged - expected).elements())
        raise ProgramError(
            f"invalid program: the gradient of {path} lacks the contributions {missing} (use, microbatch)"
            f" and has {extra} too often"
        )
