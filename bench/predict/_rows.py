"""Rows: published speeds, read from published.yaml, each with the step that it is the speed of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mpar.conf_dir import conf_dir
from mpar.hardware import Hardware, hardware
from mpar.mesh import Mesh
from mpar.program.compile import Schedule
from mpar.strategy import Strategy, preset

__all__ = ["ROLES", "Row", "read_rows"]

FILE = Path(__file__).with_name("published.yaml")
ROLES = ("fit", "judge", "factor", "slower", "paired")


@dataclass(frozen=True)
class Row:
    """One published speed.

    number, family, source: where it is from. role: one of ROLES, as published.yaml says; paired: with pairs of microbatches,
    which no published stack has.
    config:  the model, as config.json has it. machine: rates that differ from those of the profile `hardware`.
    batch:   sequences in the global batch; rows: those of one rank in a microbatch.
    chunks, layout: of an interleaved schedule. experts: the number of ranks that experts are spread over.
    seconds, tokens_per_s, mfu: the speed; one of them is given.
    """

    number: str
    family: str
    source: str
    role: str
    config: Mapping[str, Any]
    hardware: str
    mesh: Mapping[str, int]
    strategy: str
    seq_len: int
    batch: int
    rows: int
    recompute: str = "none"
    schedule: str = "one_f_one_b"
    chunks: int | None = None
    layout: str | None = None
    experts: int = 1
    machine: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None

    @property
    def num_ranks(self) -> int:
        """The number of GPUs."""
        return Mesh(**self.mesh).size

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step: those that each group of ranks with one sequence computes."""
        return self.batch // (self.rows * self.mesh.get("dp", 1) * self.mesh.get("fsdp", 1))

    def profile(self) -> Hardware:
        """The hardware profile with what this machine has differently."""
        return replace(hardware(self.hardware), **self.machine)

    def made_strategy(self) -> Strategy:
        """The strategy, with the experts of a layer spread over `experts` ranks."""
        suffix = self.strategy.removeprefix("distributed_optimizer")
        strategy = _distributed_optimizer(suffix) if suffix != self.strategy else preset(self.strategy)
        axes = ("tp", "fsdp") if "tp" in self.mesh else ("fsdp",)
        return replace(strategy, expert_parallel=self.experts, expert_axes=axes) if self.experts > 1 else strategy

    def made_schedule(self) -> Schedule:
        """The schedule of the pipeline."""
        return Schedule(self.schedule, self.chunks, self.layout, paired=self.role == "paired")


def _distributed_optimizer(suffix: str) -> Strategy:
    """Megatron's: parameters, gradients and moments are sharded as in ZeRO-3, but sent once a step."""
    return replace(preset(f"zero3{suffix}"), gather="keep", reduce="last")


def read_rows(numbers: Sequence[str] = (), families: Sequence[str] = ()) -> list[Row]:
    """The rows of published.yaml, or those of the given numbers and families."""
    text = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    configs = {name: _config(**changes) for name, changes in text["models"].items()}
    rows = []
    for family, described in text["families"].items():
        for number, own in described["rows"].items():
            facts = {**described["common"], **own}
            rows.append(Row(number, family, described["source"], config=configs[facts.pop("model")], **facts))
    return [row for row in rows if (not numbers or row.number in numbers) and (not families or row.family in families)]


def _config(preset: str, **changes: int) -> dict[str, Any]:
    described = yaml.safe_load((conf_dir() / "model" / f"{preset}.yaml").read_text(encoding="utf-8"))
    return described["config"] | changes
