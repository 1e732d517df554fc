"""`mpar measure`: measures the rates of this machine, and writes them as a hardware profile."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._later import later
from mpar.cli._screen import say, say_aside
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError
from mpar.hardware import hardware
from mpar.train import key

__all__ = ["MeasureConfig", "main"]

_HELP = f"""usage: mpar measure [name=my_box] [device=cuda] [ranks=8] [key=value] ...

Measures what ranks of this machine compute, move and exchange in a second, all at the same time, for about a quarter of a
minute. Nothing else should run meanwhile. The profile is written to conf/hardware/NAME.yaml here, for
  mpar plan --config-dir conf hardware=NAME

{SWITCHES_HELP}"""


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """The keys of `mpar measure`."""

    name: str = key("what the profile is called", default="my_machine")
    out: str | None = key("the file to write; null: conf/hardware/NAME.yaml", default=None)
    device: Literal["cpu", "cuda"] = key("what is measured", default="cpu")
    ranks: int = key("processes that measure at the same time, as many as a run has", default=2, at_least=1)
    num_threads: int | None = key("threads of each; null: the cores of this machine divided by ranks", default=None, at_least=1)
    transport: Literal["backend", "shared"] | None = key(
        "how ranks exchange: backend (gloo or NCCL), shared memory, or null: as a run does", default=None
    )
    seconds_each: float = key("seconds for which each of about 30 rates is measured", default=0.3, above=0)
    like: str = key("the profile to take from what cannot be measured, such as links between nodes", default="cpu")


def main(args: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "measure", MeasureConfig):
        return 0
    config, _ = compose_config("measure", MeasureConfig, arguments.overrides, arguments.user_dir)
    out = Path(config.out or f"conf/hardware/{config.name}.yaml")
    if out.exists():
        raise ConfigError(f"cannot write the profile to {out}: it exists. Choose another name= or out=, or delete it.")
    out.parent.mkdir(parents=True, exist_ok=True)  # now: a folder that cannot be made is told before anything is measured
    like, measure = hardware(config.like), later("mpar.measure")
    threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // config.ranks)
    machine = measure.Machine(config.ranks, config.device, threads, config.transport, config.seconds_each)
    say_aside(f"measuring {config.ranks} ranks on {config.device}, {threads} threads each")
    rates = measure.measure_machine(machine, lambda name, rate: say_aside(f"{name:30} {rate:.3g}"))
    facts = measure.facts_of(machine)
    device = facts.pop("device")
    origin = f"Measured by mpar measure on {datetime.date.today()}: {config.ranks} ranks, {device}, {threads} threads each."
    profile = measure.profile_of(config.name, rates, facts, like)
    out.write_text(measure.profile_text(profile, rates, facts, like, origin), encoding="utf-8")
    say(str(out))
    return 0
