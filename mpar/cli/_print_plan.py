"""What `mpar plan` prints: a program, its collectives, memory and time on each hardware profile; or a comparison."""

import itertools
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mpar.cli._bind import bind
from mpar.cli._choices import choices
from mpar.cli._compare import check_names, comparison, try_schedules
from mpar.cli._compose import compose_plain
from mpar.cli._placement import placement, slow_axes
from mpar.cli._run_problems import compose_run, plan_problems
from mpar.cli._screen import say, say_aside
from mpar.cli._timeline import check_suffix, write_pictures
from mpar.errors import ConfigError
from mpar.models import Trainable
from mpar.program import Hardware, Prediction, Program, diff, format_bytes, format_time, parameters_in_words
from mpar.schedules import num_stages
from mpar.train import (
    HardwareConfig,
    RunSetup,
    TrainConfig,
    flops_per_token,
    make_hardware,
    make_setup,
    num_microbatches,
)
from mpar.train.compile import compile_program

__all__ = ["print_plan"]


def print_plan(config: TrainConfig, overrides: Sequence[str], user_dir: Path | None) -> None:
    """Print the plan of `config`, which `overrides` and files in `user_dir` made: a program, a comparison, or a difference."""
    plan = config.plan
    if plan.timeline is not None:
        check_suffix(plan.timeline, several=bool(plan.compare))
    began = time.perf_counter()
    if plan.compare:
        _compare(make_setup(config))
    elif plan.diff:
        _diff(make_setup(config), overrides, user_dir)
    else:
        _plan(make_setup(config), user_dir)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say_aside(f"{time.perf_counter() - began:.1f} s in all; this process used up to {format_bytes(peak)} of memory")


def _plan(setup: RunSetup, user_dir: Path | None) -> None:
    """Print the program of one rank, its collectives, memory and time."""
    config, hardware, began = setup.config, setup.hardware, time.perf_counter()
    program = compile_program(setup)
    compiled_s = time.perf_counter() - began
    if not 0 <= config.plan.rank < program.mesh.size:
        raise ConfigError(f"cannot plan rank {config.plan.rank}: {program.mesh} has ranks 0 to {program.mesh.size - 1}")
    profiles = {profile.name: profile for profile in (hardware, *_profiles(config.plan.profiles, user_dir))}
    lines = program.text(config.plan.rank, hardware).splitlines()
    sections = [
        _overview(setup, program),
        *_shortened([_narrow(line) for line in lines], config.plan.lines),
        _render(_communication(program, config.plan.rank)),
        _render(_times(setup.counted, program, list(profiles.values()))),
    ]
    say("\n".join(sections))
    if config.plan.out is not None:
        _write(config.plan.out, "\n".join(lines))
        say(f"the full program is in {config.plan.out}")
    if config.plan.timeline is not None:
        picture = program.picture(hardware, f"{config.model.name}, {program.facts.mesh}, {program.facts.schedule}")
        write_pictures(config.plan.timeline, [picture], config.model.name)
        say(f"a picture of the step is in {config.plan.timeline}")
    say_aside(f"compiled and verified in {compiled_s:.1f} s")


def _compare(setup: RunSetup) -> None:
    """Print one table of schedules, and draw all of them if `plan.timeline` is given."""
    config, plan = setup.config, setup.config.plan
    check_names(plan.compare)
    candidates = try_schedules(setup, plan.compare, pictures=plan.timeline is not None)
    text = _render(comparison(candidates, setup.hardware))
    title = f"{config.model.name}, {setup.mesh}, {config.strategy.name}, {num_microbatches(config)} microbatches"
    title += f", {config.schedule.num_slices} slices" * (config.schedule.num_slices > 1)
    say(f"{title}\n\n{text}")
    if plan.out is not None:
        _write(plan.out, f"{title}\n\n{text}")
        say(f"the table is in {plan.out}")
    pictures = [candidate.picture for candidate in candidates if candidate.picture is not None]
    if plan.timeline is not None and pictures:
        write_pictures(plan.timeline, pictures, title)
        say(f"pictures of the steps are in {plan.timeline}")


def _diff(setup: RunSetup, overrides: Sequence[str], user_dir: Path | None) -> None:
    """Print how the program changes with the overrides in `plan.diff`."""
    config = setup.config
    other, _ = compose_run([*overrides, *config.plan.diff], user_dir, plan_problems)
    changes = diff(compile_program(setup), compile_program(make_setup(other)))
    heading = f"with {' '.join(config.plan.diff)}"
    say(f"{heading}\n{changes.text(config.plan.lines)}")
    if config.plan.out is not None:
        _write(config.plan.out, f"{heading}\n{changes.text()}")
        say(f"the full difference is in {config.plan.out}")


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(f"{text.rstrip()}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write plan.out={file}: {error.strerror}") from None


def _overview(setup: RunSetup, program: Program) -> str:
    config, model, strategy, hardware = setup.config, setup.model, setup.strategy, setup.hardware
    batch, length = program.facts.batch["tokens"]
    prediction = program.predict()
    rows = batch * program.num_microbatches
    fallbacks = ", ".join(program.facts.fallbacks) or "none"
    gathered = ", parameters gathered once a step" * (strategy.gather == "keep")
    return "\n".join(
        [
            f"model       {config.model.name}, {parameters_in_words(program)}",
            f"mesh        {program.facts.mesh}, {program.mesh.size:,} ranks",
            f"strategy    {config.strategy.name}, gradients reduced {_REDUCED[program.facts.reduce]}{gathered}; "
            f"{config.precision.name}; recompute {config.recompute.kind}",
            f"batch       {rows:,} sequence{'s' * (rows > 1)} of {length:,} positions in {program.num_microbatches} "
            f"microbatch{'es' * (program.num_microbatches > 1)}{_slices(program)}",
            *placement(model, strategy, program, config.plan.rank),
            f"program     {len(program.instructions):,} instructions of {len(program.kinds)} kinds, verified; "
            f"{sum(kind.num_nodes for kind in program.kinds.values()):,} graph nodes; replicated fallbacks: {fallbacks}",
            f"a rank      {format_bytes(prediction.state_bytes)} of state, peak {format_bytes(prediction.peak_bytes)}, "
            f"{_reserved(prediction, hardware)}{_on_host(prediction)}"
            f"workspace of one op up to {format_bytes(prediction.workspace_bytes)}{_at_most(prediction)}",
            *_pipeline(program, hardware),
            *(f"warning     {line}" for line in slow_axes(strategy, program.facts.mesh, model, hardware)),
            "",
        ]
    )


def _slices(program: Program) -> str:
    """How many slices a microbatch is cut into, if it is cut."""
    number, length = program.num_slices, program.facts.batch["tokens"][1]
    return f", {number} slices{' each,' * (program.num_microbatches > 1)} of {length // number:,} positions" if number > 1 else ""


def _reserved(prediction: Prediction, hardware: Hardware) -> str:
    """The bytes that a rank reserves where every queue has memory of its own."""
    reserved = hardware.overlaps and prediction.reserved_bytes > prediction.peak_bytes
    return f"{format_bytes(prediction.reserved_bytes)} with what each stream keeps, " if reserved else ""


def _on_host(prediction: Prediction) -> str:
    """The bytes that a rank keeps in the memory of the host with recompute.offload=true."""
    return f"{format_bytes(prediction.host_bytes)} more on the host, " if prediction.host_bytes else ""


def _at_most(prediction: Prediction) -> str:
    """The bytes that a rank needs if tokens are spread evenly over experts, and if all go to one rank, where the two differ."""
    if prediction.bytes_if_rows_meet <= prediction.need_bytes:
        return ""
    return (
        f";\n            together {format_bytes(prediction.need_bytes)} if tokens are spread evenly over experts, "
        f"{format_bytes(prediction.bytes_if_rows_meet)} if all go to one rank"
    )


def _pipeline(program: Program, hardware: Hardware) -> list[str]:
    """Two lines on a pipeline: idle time, and memory along pp."""
    if len(program.parts) == 1:
        return []
    prediction = program.predict(hardware)
    assert prediction.step_s and prediction.bubble_s is not None and prediction.span_bubble_s is not None
    idle, in_span = (100 * bubble / prediction.step_s for bubble in (prediction.bubble_s, prediction.span_bubble_s))
    peaks = [format_bytes(size) for size in program.peaks()]
    shown = peaks if len(peaks) <= 8 else [*peaks[:6], "...", peaks[-1]]
    return [
        f"pipeline    {program.facts.schedule}, {num_stages(program.schedule)} stages; bubble {idle:.1f} % of the step, "
        f"{in_span:.1f} % between a rank's first forward and its last backward ({hardware.name})",
        f"peaks       along pp: {', '.join(shown)}",
    ]


_OPERANDS = re.compile(r"(?<=\S) \([^()]*\)(?=   )|   free .*?(?=   )")
_RESULTS = re.compile(r"^(\d+ \S+ +)([^,=]+), [^=]*?= ")
_REDUCED = {"each": "every microbatch", "last": "after the last microbatch"}


def _narrow(line: str) -> str:
    """A line of the program, made short for a screen: no operands or frees, one result, equal collectives counted."""
    parts = _RESULTS.sub(lambda m: f"{m[1]}{m[2]}, ... = ", _OPERANDS.sub("", line)).split("   ")
    return "   ".join(_counted(part) for part in parts)


def _counted(part: str) -> str:
    """`7 x shift cp 1.0 MiB` for seven of them in a row."""
    runs = [(use, len(list(same))) for use, same in itertools.groupby(part.split("; "))]
    return "; ".join(use if count == 1 else f"{count} x {use}" for use, count in runs)


def _shortened(lines: list[str], limit: int) -> list[str]:
    """The heading, and of the instructions the first and last ones: about `limit` in all."""
    if len(lines) <= limit + 2:
        return [*lines, ""]
    first = max(1, limit * 2 // 3)
    last = max(1, limit - first)
    left_out = len(lines) - 1 - first - last
    return [*lines[: first + 1], f"     ... {left_out:,} more (plan.out=FILE writes all) ...", *lines[-last:], ""]


def _communication(program: Program, rank: int) -> Table:
    """A table of the collectives and messages of a rank in one step; those that are alike share a row."""
    uses: Counter = Counter()
    sent: Counter = Counter()
    for key, size in _uses(program, rank):
        uses[key] += 1
        sent[key] += size
    title = "collectives of one step" if len(program.parts) == 1 else f"collectives and messages of one step of rank {rank}"
    table = Table("collective", "over", "ranks", "in", "a step", "sent by a rank", title=title, title_justify="left")
    for key in sorted(uses):
        op, axes, size, where = key
        table.add_row(op, axes, f"{size:,}", where, f"{uses[key]:,}", format_bytes(sent[key]))
    return table


def _uses(program: Program, rank: int) -> Iterator[tuple[tuple[str, str, int, str], int]]:
    """((op, axes, ranks, where), bytes) of every collective and every sent message. where: the instruction, or what is sent."""
    for instruction in program.part(rank).instructions:
        for use in program.kinds[instruction.kind].collectives:
            yield (use.op, "x".join(use.axes), use.size, instruction.op), use.bytes
        if instruction.op == "send":
            label = {"F": "activations", "B": "their gradients", "G": "shared gradients"}[instruction.queue[-1]]
            yield ("send", f"to pp={instruction.peer}", 2, label), program.values[instruction.inputs[0]].bytes


def _times(model: Trainable, program: Program, profiles: list[Hardware]) -> Table:
    """A table of the memory and time of one step on each hardware profile.

    MFU counts attention as if it were full, "causal" half of it; HFU counts what is executed: no masked blocks, but
    recomputation.
    """
    batch, length = program.facts.batch["tokens"]
    tokens = batch * program.num_microbatches * length
    model_flops = [flops_per_token(model, length, causal=causal) * tokens for causal in (False, True)]
    table = Table(
        "hardware",
        "memory",
        "step",
        "compute",
        "communication",
        "exposed",
        "tokens/s",
        "MFU",
        "causal",
        "HFU",
        title="one step, predicted",
        title_justify="left",
    )
    for hardware in profiles:
        prediction = program.predict(hardware)
        need = prediction.need_bytes
        fits = f"{100 * need / hardware.memory_bytes:.0f} % of {format_bytes(hardware.memory_bytes)}"
        assert prediction.step_s is not None and prediction.compute_s is not None
        assert prediction.communication_s is not None and prediction.exposed_s is not None
        peak = hardware.peak_flops_per_s * program.mesh.size * prediction.step_s
        table.add_row(
            hardware.name,
            fits if need <= hardware.memory_bytes else f"too small: {fits}",
            format_time(prediction.step_s),
            format_time(prediction.compute_s),
            format_time(prediction.communication_s),
            format_time(prediction.exposed_s),
            f"{tokens / prediction.step_s:,.0f}",
            *(_percent(flops, peak) for flops in (*model_flops, _executed_flops(program))),
        )
    return table


def _executed_flops(program: Program) -> int:
    """FLOPs of all ranks in one step."""
    per_position = (program.kinds[instruction.kind].flops for part in program.parts for instruction in part.instructions)
    return sum(per_position) * (program.mesh.size // len(program.parts))


def _percent(flops: float, peak: float) -> str:
    return f"{100 * flops / peak:.1f} %" if peak else "-"


def _render(table: Table) -> str:
    console = Console(width=140, record=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _profiles(names: Sequence[str], user_dir: Path | None) -> list[Hardware]:
    """The hardware profiles of these names."""
    known = choices(user_dir).shown["hardware"]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"plan.profiles: no hardware profile is called {', '.join(unknown)}; there are {', '.join(known)}")
    plain = [compose_plain("train", TrainConfig, [f"hardware={name}"], user_dir)["hardware"] for name in names]
    return [make_hardware(bind(HardwareConfig, values)) for values in plain if isinstance(values, dict)]
