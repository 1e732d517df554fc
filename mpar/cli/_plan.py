"""`mpar plan`: compile, verify and predict a run; print its program, collectives, memory, and time on each hardware profile."""

import math
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from mpar.cli._bind import bind
from mpar.cli._compose import compose_config, conf_dir, describe_config
from mpar.cli._screen import say, say_aside
from mpar.errors import ConfigError
from mpar.program import CollectiveUse, Hardware, Instruction, Program, format_bytes, format_time
from mpar.train import TrainConfig, flops_per_token, make_hardware, make_model
from mpar.train._config import HardwareConfig
from mpar.train.prepare import compile_program

__all__ = ["main"]

_HELP = """usage: mpar plan [group=choice] [key=value] ... [plan.out=FILE]

Takes what `mpar train` takes. Starts no process and makes no tensor: the largest model on any mesh is planned on a laptop."""


def main(args: Sequence[str]) -> int:
    """Plan; returns the exit code."""
    if "-h" in args or "--help" in args:
        shown = [arg for arg in args if arg not in ("-h", "--help")]
        say(f"{_HELP}\n\n{describe_config('train', TrainConfig, shown)}")
        return 0
    config, _ = compose_config("train", TrainConfig, args)
    began = time.perf_counter()
    program = compile_program(config)
    compiled_s = time.perf_counter() - began
    if not 0 <= config.plan.rank < program.mesh.size:
        raise ConfigError(f"cannot plan rank {config.plan.rank}: {program.mesh} has ranks 0 to {program.mesh.size - 1}")
    hardware = make_hardware(config.hardware)
    profiles = {profile.name: profile for profile in (*_profiles(), hardware)}
    lines = program.text(config.plan.rank, hardware).splitlines()
    whole = "\n".join(
        [
            _overview(config, program),
            *_shortened([_narrow(line) for line in lines], config.plan.lines),
            _render(_collectives(program)),
            _render(_times(config, program, list(profiles.values()))),
        ]
    )
    say(whole)
    if config.plan.out is not None:
        Path(config.plan.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
        say(f"the whole program: {config.plan.out}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say_aside(
        f"compiled and verified in {compiled_s:.1f} s, {time.perf_counter() - began:.1f} s in all; "
        f"this process took {format_bytes(peak)}"
    )
    return 0


def _overview(config: TrainConfig, program: Program) -> str:
    parameters = sum(math.prod(leaf.shape) for leaf in program.state_in if leaf.path.startswith("params."))
    batch, length = program.info["batch"]["tokens"]
    prediction = program.predict()
    fallbacks = ", ".join(program.info["fallbacks"]) or "none"
    return "\n".join(
        [
            f"model       {config.model.name}, {parameters / 1e6:,.2f} M parameters",
            f"mesh        {program.info['public_mesh']}, {program.mesh.size:,} ranks",
            f"strategy    {config.strategy.name}, gradients reduced {_REDUCED[program.info['reduce']]}; {config.precision.name}; "
            f"recompute {config.recompute.kind}",
            f"batch       {batch * program.num_microbatches:,} sequences of {length:,} positions in {program.num_microbatches} "
            f"microbatch{'es' * (program.num_microbatches > 1)}",
            f"program     {len(program.instructions):,} instructions of {len(program.kinds)} kinds, verified; "
            f"{sum(kind.num_nodes for kind in program.kinds.values()):,} graph nodes; replicated fallbacks: {fallbacks}",
            f"a rank      {format_bytes(prediction.state_bytes)} of state, peak {format_bytes(prediction.peak_bytes)}, "
            f"workspace of one op up to {format_bytes(prediction.workspace_bytes)}",
            "",
        ]
    )


_OPERANDS = re.compile(r"(?<=\S) \([^()]*\)(?=   )|   free .*?(?=   )")
_RESULTS = re.compile(r"^(\d+ \S+ +)([^,=]+), [^=]*?= ")
_REDUCED = {"each": "every microbatch", "last": "after the last microbatch"}


def _narrow(line: str) -> str:
    """A line without operands and frees, and with the first result only, for a screen."""
    return _RESULTS.sub(lambda m: f"{m[1]}{m[2]}, ... = ", _OPERANDS.sub("", line))


def _shortened(lines: list[str], most: int) -> list[str]:
    """The head, the first instructions and the last ones."""
    if len(lines) <= most + 2:
        return [*lines, ""]
    first = max(1, most * 2 // 3)
    last = max(1, most - first)
    left_out = len(lines) - 1 - first - last
    return [*lines[: first + 1], f"     ... {left_out:,} more (plan.out=FILE writes all) ...", *lines[-last:], ""]


def _collectives(program: Program) -> Table:
    """Collectives of one step, those of one kind in a row."""
    uses = Counter((use.op, "x".join(use.axes), use.size, step.op) for step, use in _uses(program))
    sent: Counter = Counter()
    for step, use in _uses(program):
        sent[use.op, "x".join(use.axes), use.size, step.op] += use.bytes
    table = Table(
        "collective", "over", "ranks", "in", "a step", "sent by a rank", title="collectives of one step", title_justify="left"
    )
    for key in sorted(uses):
        op, axes, size, where = key
        table.add_row(op, axes, f"{size:,}", where, f"{uses[key]:,}", format_bytes(sent[key]))
    return table


def _uses(program: Program) -> Iterator[tuple[Instruction, CollectiveUse]]:
    return ((step, use) for step in program.instructions for use in program.kinds[step.kind].collectives)


def _times(config: TrainConfig, program: Program, profiles: list[Hardware]) -> Table:
    """Memory and time of one step on each profile."""
    batch, length = program.info["batch"]["tokens"]
    tokens = batch * program.num_microbatches * length
    flops = flops_per_token(make_model(config), length, causal=False) * tokens
    table = Table(
        "hardware",
        "memory",
        "step",
        "compute",
        "communication",
        "tokens/s",
        "MFU",
        title="one step, predicted",
        title_justify="left",
    )
    for hardware in profiles:
        prediction = program.predict(hardware)
        need = prediction.peak_bytes + prediction.workspace_bytes
        fits = f"{100 * need / hardware.memory_bytes:.0f} % of {format_bytes(hardware.memory_bytes)}"
        assert prediction.step_s is not None and prediction.compute_s is not None and prediction.communication_s is not None
        peak = hardware.peak_flops_per_s * program.mesh.size * prediction.step_s
        table.add_row(
            hardware.name,
            fits if need <= hardware.memory_bytes else f"too small: {fits}",
            format_time(prediction.step_s),
            format_time(prediction.compute_s),
            format_time(prediction.communication_s),
            f"{tokens / prediction.step_s:,.0f}",
            f"{100 * flops / peak:.0f} %" if peak else "-",
        )
    return table


def _render(table: Table) -> str:
    console = Console(width=130, record=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _profiles() -> list[Hardware]:
    """Every profile in conf/hardware."""
    files = sorted((conf_dir() / "hardware").glob("*.yaml"))
    plain: list[Any] = [OmegaConf.to_container(OmegaConf.load(file)) for file in files]
    return [make_hardware(bind(HardwareConfig, values)) for values in plain]
