"""Memory of a step, exactly: the bytes that a rank holds at every instruction, counted by storages."""

from collections.abc import Iterator

from mpar.ir import Part, ProgramData, sweep

__all__ = ["host_bytes", "memory_timeline", "timeline"]


def memory_timeline(program: ProgramData, position: int = 0) -> list[tuple[int, int]]:
    """For each instruction of one position along pp: the most bytes while it runs, and the bytes after it. State, batch,
    constants and the values of messages are included."""
    return list(timeline(program, program.parts[position]))


def timeline(program: ProgramData, part: Part, *, workspace: bool = False, all_rows: bool = False) -> Iterator[tuple[int, int]]:
    """`memory_timeline` of a part; workspace: with that inside ops; all_rows: as if a router sent all rows to this rank."""
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
    used = {instruction.kind for instruction in part.instructions}
    constants = sum(t.nbytes for name in used for t in program.kinds[name].constants.values())
    live = constants + sum(sizes[storage] for storage in users)
    for instruction in part.instructions:
        kind = program.kinds[instruction.kind]
        memory = kind.memory_if_rows_meet if all_rows and kind.memory_if_rows_meet is not None else kind.memory
        frees = set(instruction.frees)
        num_freed = {values[v].storage: 0 for v in frees}  # values of each storage
        for v in frees:
            num_freed[values[v].storage] += 1
        released = {storage for storage, count in num_freed.items() if users.get(storage, 0) == count}
        donated = frozenset(
            local for local, v in zip(memory.inputs, instruction.inputs, strict=True) if values[v].storage in released
        )
        peak = live + sweep(memory, donated, workspace=workspace)
        for local, v in zip(memory.outputs, instruction.outputs, strict=True):
            if values[v].storage not in users:
                live += memory.sizes[local]
            hold(v, memory.sizes[local])
        made = {values[v].storage for v in instruction.outputs}
        peak = max(peak, live - sum(sizes[s] for s in released if s in users and s not in made))
        for v in frees:
            storage = values[v].storage
            users[storage] -= 1
            if not users[storage]:
                del users[storage]
                live -= sizes.pop(storage)
        yield max(peak, live), live


def host_bytes(program: ProgramData, part: Part) -> int:
    """The most bytes that are in the memory of the host at one time."""
    held = memory_if_rows_meet = 0
    offloaded: set[int] = set()
    for instruction in part.instructions:
        if instruction.op == "offload":
            offloaded.add(instruction.outputs[0])
            held += program.values[instruction.outputs[0]].bytes
        memory_if_rows_meet = max(memory_if_rows_meet, held)
        held -= sum(program.values[v].bytes for v in instruction.frees if v in offloaded)
    return memory_if_rows_meet
