"""What came of a sweep: a table on the screen, `sweep.csv`, and a picture of the losses of all jobs."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mpar.cli._screen import say
from mpar.train.curve import draw_losses

__all__ = ["JobResult", "report_sweep"]

_WIDTH = 130


@dataclass(frozen=True)
class JobResult:
    """What one job of a sweep hands back to it, maybe from another process.

    overrides: all of the job. time_s: of the whole job; None if an earlier run of the sweep did it. records: those of
    metrics.jsonl, empty if no step was done.
    """

    name: str
    overrides: tuple[str, ...]
    run_dir: str
    failed: bool
    time_s: float | None
    records: Sequence[dict[str, float]]

    @property
    def kind(self) -> str:
        """The loss by which jobs are compared: of evaluations if there were any, else of training."""
        return "eval_loss" if any("eval_loss" in record for record in self.records) else "loss"

    @property
    def final(self) -> float | None:
        """The last loss; None if there is none."""
        losses = self._losses()
        return losses[-1] if losses else None

    @property
    def best(self) -> float | None:
        """The lowest loss; None if there is none."""
        return min(self._losses(), default=None)

    def _losses(self) -> list[float]:
        return [record[self.kind] for record in self.records if self.kind in record]


def report_sweep(results: Sequence[JobResult], folder: Path) -> None:
    """Print the table of `results`, and write sweep.csv and sweep.png into `folder`, the folder of the sweep."""
    settings = [_settings(result) for result in results]
    keys = [key for key in dict.fromkeys(key for setting in settings for key in setting) if _differs(key, settings)]
    finished = [result for result in results if result.best is not None and not result.failed]
    best = min(finished, key=lambda result: result.best or 0.0, default=None)
    table = Table("job", *keys, "final loss", "best loss", "time", "folder", "", title="sweep", title_justify="left")
    for result, setting in zip(results, settings, strict=True):
        mark = "best" if result is best else "failed" if result.failed else ""
        values = [setting.get(key, "") for key in keys]
        losses = (_loss(result.final), _loss(result.best))
        time_s = "" if result.time_s is None else f"{result.time_s:.0f} s"
        table.add_row(result.name, *values, *losses, time_s, os.path.relpath(result.run_dir), mark)
    console = Console(width=_WIDTH, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    file = folder / "sweep.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["job", *keys, "final_loss", "best_loss", "time_s", "run_dir", "status"])
        for result, setting in zip(results, settings, strict=True):
            status = "failed" if result.failed else "best" if result is best else "ok"
            row = [result.final, result.best, None if result.time_s is None else round(result.time_s, 1), result.run_dir, status]
            writer.writerow([result.name, *(setting.get(key, "") for key in keys), *row])
    curves = {_label(result, setting, keys): result.records for result, setting in zip(results, settings, strict=True)}
    picture = draw_losses({label: records for label, records in curves.items() if records}, folder / "sweep.png", folder.name)
    say(capture.get().rstrip())
    say(f"table        {file}" + (f"\nlosses       {picture}" if picture else ""))


def _settings(result: JobResult) -> dict[str, str]:
    """The overrides of a job by key."""
    pairs = (override.lstrip("+").partition("=") for override in result.overrides)
    return {key: value for key, _, value in pairs}


def _differs(key: str, settings: Sequence[dict[str, str]]) -> bool:
    return len({setting.get(key) for setting in settings}) > 1


def _label(result: JobResult, setting: dict[str, str], keys: Sequence[str]) -> str:
    words = " ".join(f"{key.rpartition('.')[2]}={setting.get(key, '')}" for key in keys)
    return f"{result.name}: {words}" if words else result.name


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
