"""`mpar train -m`: Hydra's sweeper makes jobs of the overrides, its launcher calls `train_job` for each; both may be plugins."""

import dataclasses
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mpar.cli._arguments import Arguments
from mpar.cli._compose import bind_composed, check_overrides, hydra_ready
from mpar.cli._screen import say_aside, show_error
from mpar.cli._train_once import train_once
from mpar.errors import MparError
from mpar.train import TrainConfig

__all__ = ["sweep", "train_job"]

_SETTINGS = (
    "hydra.sweep.dir=runs/sweep_${now:%Y-%m-%d_%H-%M-%S}",
    "hydra.sweep.subdir=${hydra.job.num}",
    "hydra.output_subdir=null",
    "hydra/hydra_logging=none",
    "hydra/job_logging=none",
)


def sweep(arguments: Arguments) -> int:
    """Train once for every combination of values; returns the exit code. Hydra alone decides in which process a job runs."""
    checked = check_overrides("train", TrainConfig, arguments.overrides, arguments.user_dir)
    with hydra_ready([*_SETTINGS, *checked], arguments.user_dir) as overrides:
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        batches = hydra.multirun("train", train_job, overrides)
    failed = [job.return_value for batch in batches or () for job in batch if job.return_value is not None]
    if failed:
        say_aside(f"jobs that failed: {', '.join(failed)}")
    return 1 if failed else 0


def train_job(composed: DictConfig) -> str | None:
    """Run one job of a sweep, in the process that Hydra's launcher chose. Returns the job's name if it raised an MparError."""
    settings = HydraConfig.get()
    name = Path(settings.runtime.output_dir).name
    say_aside(f"--- job {name}: {' '.join(settings.overrides.task)}")
    try:
        config, resolved = bind_composed(TrainConfig, composed)
        run_dir = settings.runtime.output_dir if config.run_dir is None else str(Path(config.run_dir) / name)
        train_once(dataclasses.replace(config, run_dir=run_dir), resolved)
    except MparError as error:
        show_error(error)
        return name
    return None
