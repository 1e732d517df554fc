"""Text: a program for people to read, one line for each instruction, with bytes and predicted times."""

from mpar.forecast import memory_timeline, predicted_times
from mpar.hardware import Hardware
from mpar.ir import CollectiveUse, Instruction, ProgramData
from mpar.program._kernels import describe_kernels

__all__ = ["format_bytes", "format_time", "parameters_in_words", "text"]


def text(program: ProgramData, rank: int = 0, hardware: Hardware | None = None) -> str:
    """The program of `rank`: a heading, the kernels, then every instruction with its operands, collectives and the live bytes.

    With a hardware profile there are times too.
    """
    mesh, position = program.mesh, program.position(rank)
    where = " ".join(f"{axis}={index}" for axis, index in mesh.coordinates(rank).items())
    timeline = memory_timeline(program, position)
    head = f"rank {rank} of {mesh.size} ({where})   peak {format_bytes(max(peak for peak, _ in timeline))} predicted"
    times = [""] * len(timeline)
    if hardware:
        predicted = predicted_times(program, hardware)
        exposed = predicted.exposed[position]
        times = [
            format_time(end - start) + (f", {format_time(exposed[line])} exposed" if line in exposed else "")
            for line, (start, end) in enumerate(zip(predicted.start[position], predicted.end[position], strict=True))
        ]
        head += f"   step {format_time(predicted.makespan)} predicted on {hardware.name}"
    if program.facts.frozen:
        head += f"   {parameters_in_words(program)}"
    lines = [head]
    used = {instruction.kind for instruction in program.parts[position].instructions}
    kernels = describe_kernels(program.facts.kernels, (use for name in used for use in program.kinds[name].kernels))
    if kernels:
        lines.append(kernels)
    for number, instruction in enumerate(program.parts[position].instructions):
        lines.append(_line(program, number, instruction, timeline[number][1], times[number]))
    return "\n".join(lines)


def _line(program: ProgramData, number: int, instruction: Instruction, live: int, time: str) -> str:
    names = program.values
    results = _names([names[v].name for v in instruction.outputs])
    words = instruction.words
    operands = _names([names[v].name for v in instruction.inputs])
    if instruction.message >= 0:
        words += f" message {instruction.message}" + (f" pp={instruction.peer}" if instruction.op == "wait" else "")
    made = f"{results} = " if instruction.outputs or instruction.message < 0 else ""
    parts = [f"{number:04d} {instruction.queue:8} {made}{words} ({operands})"]
    uses = program.kinds[instruction.kind].collectives
    if uses:
        parts.append("; ".join(_collective(use) for use in uses))
    if instruction.op in ("send", "recv"):
        parts.append(format_bytes(names[(instruction.inputs or instruction.outputs)[0]].bytes))
    if instruction.frees:
        parts.append("free " + _names([names[v].name for v in instruction.frees]))
    parts.append(format_bytes(live))
    if time:
        parts.append(time)
    return "   ".join(parts)


def _collective(use: CollectiveUse) -> str:
    """A collective with the bytes that one rank contributes; if a router decides how many arrive, the average and the most."""
    sent = format_bytes(use.bytes)
    if use.ragged:
        sent += f", arriving on average, at most {format_bytes(use.bytes * use.size)}"
    return f"{use.op} {'x'.join(use.axes)} {sent}"


def _names(names: list[str], max_shown: int = 4) -> str:
    shown = names if len(names) <= max_shown else [*names[: max_shown - 1], f"... {names[-1]} [{len(names)}]"]
    return ", ".join(shown)


def parameters_in_words(program: ProgramData) -> str:
    """How many parameters there are, and how many of them are trained and frozen if some are."""
    trained, frozen = program.num_parameters()
    words = f"{(trained + frozen) / 1e6:,.2f} M parameters"
    return f"{words} ({trained / 1e6:,.2f} M trained, {frozen / 1e6:,.2f} M frozen)" if frozen else words


def format_bytes(count: int) -> str:
    """`1536` as `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def format_time(seconds: float) -> str:
    """Seconds with three digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError
