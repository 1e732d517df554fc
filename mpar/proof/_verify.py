"""Verify: what must hold of every program before it may run. Linear in the number of instructions."""

from collections import Counter

from mpar.errors import ProgramError
from mpar.ir import ProgramData, Value
from mpar.proof._dataflow import check_dataflow
from mpar.proof._fail import describe, fail
from mpar.proof._frozen import check_frozen
from mpar.schedules import Event, check_order

__all__ = ["events", "verify"]


def verify(program: ProgramData, queues: str = "direction") -> None:
    """Raise ProgramError, naming position and line, unless

    - every value is made once, is read only after it was made or has arrived and before it is freed or written over, and is freed
      once, so that at the end only the batch, the scalars and the results exist;
    - the values of every instruction have the shapes and dtypes for which its kind was compiled;
    - every collective runs over axes of the mesh, and its size is the number of ranks along these axes;
    - the two ends of every message agree on shape and dtype and meet in order, and no rank waits for ever, under the model of
      queues called `queues` (see `mpar.schedules.check_order`);
    - positions along pp meet in a collective on the same queue: another queue may have groups of its own;
    - the contribution of every microbatch enters each stored gradient exactly once, in the order of the schedule, and every other
      operand is what it should be, as far as the program shows it: see `check_dataflow`;
    - frozen parameters have no gradient and keep their values, and all others are updated: see `check_frozen`.

    Ranks at the same position along pp run the same part, so they agree on every collective that does not cross pp. What holds
    for one rank of each position therefore holds for all.
    """
    for position in range(len(program.parts)):
        _check_shapes(program, position)
        _check_lifetimes(program, position)
        _check_overwritten(program, position)
    _check_collectives(program)
    _check_messages(program)
    check_order(events(program), queues=queues, describe=lambda rank, line: describe(program.parts[rank].instructions[line]))
    check_dataflow(program)
    check_frozen(program)


def _check_lifetimes(program: ProgramData, position: int) -> None:
    names, part = program.values, program.parts[position]
    live = {leaf.value for leaf in part.reads()}
    made = set(live)
    freed: set[int] = set()
    posted: dict[int, tuple[int, int]] = {}  # message on its way -> its value, position of the other end
    arriving: set[int] = set()  # values that messages on their way bring
    leaving: Counter[int] = Counter()  # how many messages on their way send each value
    for line, instruction in enumerate(part.instructions):
        for v in instruction.inputs:
            if v not in live:
                state = "was freed" if v in freed else "nothing has made yet"
                fail(program, position, line, instruction, f"reads {names[v].name}, which {state}")
            if v in arriving and instruction.op != "wait":
                fail(program, position, line, instruction, f"reads {names[v].name}, whose message has not been waited for")
        for v in instruction.outputs:
            if v in made:
                fail(program, position, line, instruction, f"makes {names[v].name} a second time")
            made.add(v)
            live.add(v)
        if instruction.op in ("send", "recv"):
            value = (instruction.inputs or instruction.outputs)[0]
            posted[instruction.message] = value, instruction.peer
            leaving[value] += instruction.op == "send"
            arriving |= {value} if instruction.op == "recv" else set()
        elif instruction.op == "wait":
            if posted.pop(instruction.message, None) != (instruction.inputs[0], instruction.peer):
                why = f"waits for a message of {names[instruction.inputs[0]].name} with pp={instruction.peer} that was not posted"
                fail(program, position, line, instruction, why)
            leaving[instruction.inputs[0]] -= instruction.inputs[0] not in arriving
            arriving.discard(instruction.inputs[0])
        if any(leaving[instruction.inputs[i]] for i in program.kinds[instruction.kind].overwrites):
            fail(program, position, line, instruction, "writes over a value whose message has not been waited for")
        for v in instruction.frees:
            if v not in live:
                state = "was freed before" if v in freed else "does not exist"
                fail(program, position, line, instruction, f"frees {names[v].name}, which {state}")
            if v in arriving or leaving[v]:
                fail(program, position, line, instruction, f"frees {names[v].name}, whose message has not been waited for")
            live.remove(v)
            freed.add(v)
    expected_live = {leaf.value for leaf in (*part.state_out, *part.metrics, *part.batch, *part.scalars)}
    missing, leaked = expected_live - live, live - expected_live
    if missing or leaked:
        raise ProgramError(
            f"invalid program: at its end the values {sorted(names[v].name for v in missing)} are missing and "
            f"{sorted(names[v].name for v in leaked)} were never freed"
        )


def _check_overwritten(program: ProgramData, position: int) -> None:
    """Raise ProgramError if state of a segment is read, or returned, after an instruction has written over it."""
    names, part = program.values, program.parts[position]
    kept = {names[leaf.value].storage for leaf in part.state_in if leaf.path.startswith("state.")}
    by_storage: dict[int, list[int]] = {}
    for v in (*(leaf.value for leaf in part.reads()), *(v for i in part.instructions for v in i.outputs)):
        by_storage.setdefault(names[v].storage, []).append(v)
    made = {leaf.value for leaf in part.reads()}
    spoiled: dict[int, int] = {}  # values that were written over, and the line that did it
    for line, instruction in enumerate(part.instructions):
        late = next((v for v in instruction.inputs if v in spoiled), None)
        if late is not None:
            why = f"reads {names[late].name}, over which line {spoiled[late]:04d} has written"
            fail(program, position, line, instruction, why)
        for w in (instruction.inputs[i] for i in program.kinds[instruction.kind].overwrites):
            if names[w].storage not in kept:
                continue
            beside = (v for v in by_storage[names[w].storage] if v in made and _overlap(names[v], names[w]))
            spoiled |= dict.fromkeys(beside, line)
        made.update(instruction.outputs)
    lost = sorted(names[leaf.value].name for leaf in (*part.state_out, *part.metrics) if leaf.value in spoiled)
    if lost:
        raise ProgramError(f"invalid program: it returns the values {lost}, which were written over")


def _overlap(a: Value, b: Value) -> bool:
    """Whether two values share memory."""
    return a.storage == b.storage and a.offset < b.offset + _num_elements(b) and b.offset < a.offset + _num_elements(a)


def _num_elements(value: Value) -> int:
    return value.bytes // value.dtype.itemsize


def _check_shapes(program: ProgramData, position: int) -> None:
    for line, instruction in enumerate(program.parts[position].instructions):
        kind = program.kinds[instruction.kind]
        for role, actual, expected in (
            ("operand", instruction.inputs, kind.operands),
            ("result", instruction.outputs, kind.results),
        ):
            if len(actual) != len(expected):
                why = f"has {len(actual)} {role}s, its segment {kind.name!r} has {len(expected)}"
                fail(program, position, line, instruction, why)
            for v, (shape, dtype) in zip(actual, expected, strict=True):
                value = program.values[v]
                if (value.shape, value.dtype) != (shape, dtype):
                    why = f"{role} {value.name} is {value.dtype} {value.shape}, its segment has {dtype} {shape}"
                    fail(program, position, line, instruction, why)


def _check_collectives(program: ProgramData) -> None:
    for name, kind in program.kinds.items():
        for use in kind.collectives:
            unknown = [axis for axis in use.axes if axis not in program.mesh.axes]
            if unknown or program.mesh.axis_size(use.axes) != use.size:
                raise ProgramError(
                    f"invalid program: segment {name!r} has a {use.op} of {use.size} ranks over {use.axes}, which does not fit "
                    f"{program.mesh}"
                )


def _check_messages(program: ProgramData) -> None:
    """Raise ProgramError unless both ends of each message have the same shape and dtype and use the same channel."""
    ends: dict[int, tuple[int, int, str, Value]] = {}
    for position, part in enumerate(program.parts):
        for line, instruction in enumerate(part.instructions):
            if instruction.op in ("send", "recv"):
                value = program.values[(instruction.inputs or instruction.outputs)[0]]
                channel = instruction.queue[-1:]
                *other_end, other_channel, other = ends.setdefault(instruction.message, (position, line, channel, value))
                if (other.shape, other.dtype, other_channel) != (value.shape, value.dtype, channel):
                    why = (
                        f"{value.name} is {value.dtype} {value.shape} in channel {channel}; at the other end, pp={other_end[0]} "
                        f"line {other_end[1]:04d}, {other.name} is {other.dtype} {other.shape} in channel {other_channel}"
                    )
                    fail(program, position, line, instruction, why)


def events(program: ProgramData) -> list[list[Event]]:
    """For each position along pp, where it may have to wait for another position: messages, and collectives that cross pp."""
    everybody = tuple(range(len(program.parts)))
    crossing = {
        name: tuple(use for use in kind.collectives if "pp" in use.axes)
        for name, kind in program.kinds.items()
        if len(program.parts) > 1
    }
    out: list[list[Event]] = []
    for part in program.parts:
        part_events = []
        for line, instruction in enumerate(part.instructions):
            if instruction.op in ("send", "recv", "wait"):
                part_events.append(Event(instruction.op, instruction.message, (instruction.peer,), line))
            else:
                part_events += [
                    Event("meet", (instruction.kind, index, instruction.queue), everybody, line)
                    for index, use in enumerate(crossing.get(instruction.kind, ()))
                ]
        out.append(part_events)
    return out
