"""Groups of a configuration that say what happens beside the steps: checkpoints, going on, spikes, evaluation, plans."""

from dataclasses import dataclass
from typing import Literal

from mpar.train._key import key

__all__ = ["CheckpointConfig", "EvaluationConfig", "PlanConfig", "ResumeConfig", "SpikeConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, what is in them, and which are kept."""

    every: int | None = key(
        "write one after every so many steps, and at the end; null: only at the end", default=None, at_least=1
    )
    keep: int | None = key("how many of the newest are kept; null: all", default=2, at_least=1)
    keep_every: int | None = key("those of steps that this divides are kept, too; null: no others", default=None, at_least=1)
    keep_best: int | None = key("so many of the lowest evaluation loss are kept, too; null: no others", default=None, at_least=1)
    mode: Literal["async", "sync"] = key(
        "async: training goes on while a copy of the state is written; sync: training waits", default="async"
    )
    optimizer_state: bool = key(
        "save the optimizer's state; without it a run cannot go on, only begin from the weights", default=True
    )
    on_damaged: Literal["stop", "move_aside"] = key(
        "if the newest checkpoint in run_dir is damaged, stop: name it; move_aside: rename it, and go on from the one before",
        default="stop",
    )
    check_replicas: int | None = key(
        "compare the copies that several ranks have of the same values after every so many steps; null: never",
        default=None,
        at_least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """How a run goes on. One word is enough: `resume=weights` is `resume.state=weights`, other words are `resume.path`."""

    path: str = key(
        "auto: go on from the newest checkpoint in run_dir, if there is one; never: stop if there is one; or the folder of a "
        "checkpoint or of a run",
        default="auto",
    )
    state: Literal["all", "weights"] = key(
        "weights: take only parameters; the optimizer and its learning rate begin anew, over the steps that are left",
        default="all",
    )
    data: Literal["same", "restart"] = key(
        "same: refuse data that are unlike those of the checkpoint; restart: read unlike data from their beginning; steps go on",
        default="same",
    )
    allow_change: bool = key("go on although the configuration changes the function that the model computes", default=False)

    @staticmethod
    def key_of_word(word: str) -> str:
        """The key that `resume=WORD` sets to WORD."""
        return "state" if word == "weights" else "path"


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """When a loss or a gradient norm is a spike; on_spike says what happens then."""

    z: float = key("standard deviations above the median of the last steps from which a value is a spike", default=6.0, above=0)
    window: int = key(
        "steps that are looked back over; there are no spikes in the first 16 steps of a run", default=128, at_least=16
    )
    max_skips: int = key("stop if more than this many steps in a row were skipped", default=10, at_least=0)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loss on data that are not trained on; of tasks that draw answers, what answers to other prompts are worth. Nothing is
    evaluated unless `sources` or `fraction` is given, or both."""

    every: int | None = key("evaluate after every so many steps, and at the end; null: only at the end", default=None, at_least=1)
    sources: tuple[str, ...] | dict[str, str | tuple[str, ...]] | None = key(
        "data to evaluate on, as in data.sources; {NAME: FILE, OTHER: [FILES]} are sets with losses of their own", default=None
    )
    fraction: float | None = key(
        "hold this share of the rows of data.sources out of training, to evaluate on", default=None, above=0, below=1
    )
    batches: int | None = key(
        "how many batches of each set an evaluation reads, of prompts with one in each row; null: all", default=None, at_least=1
    )
    answers: int | None = key(
        "of tasks that draw answers: so many are drawn to each prompt to evaluate on; null: one, of the likeliest tokens",
        default=None,
        at_least=1,
    )

    @property
    def has_data(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.sources is not None or self.fraction is not None

    @property
    def sets(self) -> dict[str, tuple[str, ...]]:
        """The sources of each set, by its name; without what is held out of the data."""
        if self.sources is None:
            return {}
        if isinstance(self.sources, tuple):
            return {"sources": self.sources}
        return {name: (found,) if isinstance(found, str) else found for name, found in self.sources.items()}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What `mpar plan` prints."""

    out: str | None = key("file for the full program, table or difference", default=None)
    timeline: str | None = key("file for a picture of the step: .html, .svg, or .json for chrome://tracing", default=None)
    compare: tuple[str, ...] = key("schedules to compare in one table", default=())
    diff: tuple[str, ...] = key("overrides, as on the command line: print how the program changes with them", default=())
    profiles: tuple[str, ...] = key(
        "hardware profiles to predict times for, besides `hardware`", default=("h100_dgx", "h200", "b200")
    )
    rank: int = key("the rank whose program is printed", default=0, at_least=0)
    lines: int = key("lines of the program, or of the difference, on the screen", default=24, at_least=0)
