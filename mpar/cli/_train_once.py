"""One run of `mpar train` on this machine: prepares it, starts the ranks, then exports the model, draws pictures and asks it."""

import dataclasses
import time
from pathlib import Path

from mpar.cli._go_on import after_failure, after_stop
from mpar.cli._job_folder import job_folder
from mpar.cli._later import later
from mpar.cli._launch import RankFailure, launch
from mpar.cli._run_lock import locked_run_dir
from mpar.cli._screen import say_aside, show_error
from mpar.cli._signals import Stopped
from mpar.cli._start import prepared_start
from mpar.errors import CheckpointError, MparError
from mpar.train import PlainConfig, TrainConfig, deadline_after

__all__ = ["train_once"]


def train_once(config: TrainConfig, resolved: PlainConfig, sweep: Path | None = None, *, trained: bool = False) -> None:
    """Do all of one run: prepare, train, export, draw, and ask the trained model.

    sweep: the folder of the sweep, if it is a job of one. trained: all steps are done already.

    Raises Stopped, whose message says how to go on, if a signal or the time limit ended the run.
    """
    began = time.perf_counter()
    deadline = deadline_after(config.time_limit)
    try:
        with locked_run_dir(config.run_dir) as (run_dir, lock):
            config = dataclasses.replace(config, run_dir=str(run_dir))
            if not trained:
                with job_folder() as folder:
                    start = prepared_start(config, resolved | {"run_dir": str(run_dir)}, folder)
                    say_aside(f"{start.summary}\nprepared in {time.perf_counter() - began:.1f} s, {start.source}")
                    _launch_again(config, folder, deadline, lock, sweep)
            later("mpar.cli._finish").finish(config)
    except Stopped as stopped:
        raise Stopped(stopped.code, f"{stopped}; {after_stop(config, sweep)}") from None


def _launch_again(config: TrainConfig, folder: Path, deadline: float | None, lock: int, sweep: Path | None) -> None:
    """Launch; if a rank is lost, launch again from the newest checkpoint, at most `restarts` times."""
    restarts = 0
    while True:
        try:
            return launch(config, folder, deadline, [lock])
        except CheckpointError:
            raise
        except MparError as error:
            if not isinstance(error, RankFailure) or restarts == config.restarts:
                raise type(error)(f"{error}{after_failure(config, sweep)}") from None
            show_error(error)
        restarts += 1
        say_aside(f"restart {restarts} of {config.restarts}: goes on {_go_on(config, folder)}")


def _go_on(config: TrainConfig, folder: Path) -> str:
    """Change the job in `folder` so that it goes on from the newest checkpoint; returns from where, in words."""
    newest = later("mpar.checkpoint").latest(Path(str(config.run_dir)) / "checkpoints")
    train = later("mpar.train")
    job = train.read_job(folder)
    if newest is None:  # what the run itself began from, then
        return "from the start, as there is no checkpoint" if job.resume is None else f"from {job.resume}"
    going_on = dataclasses.replace(job.config.resume, state="all")  # the optimizer must not begin anew once more
    then = dataclasses.replace(job.config, resume=going_on)
    train.write_job(folder, dataclasses.replace(job, resume=newest, config=then))
    return f"from {newest}"
