"""`mpar train -m`: Hydra's sweeper makes jobs of the overrides, its launcher calls `train_job` for each; both may be plugins."""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from mpar.cli._arguments import Arguments
from mpar.cli._bind import listed
from mpar.cli._compose import check_overrides, hydra_ready, plain_config
from mpar.cli._finished import finished_steps
from mpar.cli._later import later
from mpar.cli._new_folder import new_folder
from mpar.cli._paths import with_absolute_paths
from mpar.cli._run_problems import bind_run, run_problems
from mpar.cli._screen import give_output_up, say_aside, show_error
from mpar.cli._signals import signals_stop
from mpar.cli._sweep_results import JobResult, report_sweep
from mpar.cli._train_once import train_once
from mpar.errors import ConfigError
from mpar.train import PlainConfig, TrainConfig, read_metrics

__all__ = ["sweep", "train_job"]

_SETTINGS = (
    "hydra.sweep.subdir=${hydra.job.num}",
    "hydra.output_subdir=null",
    "hydra/hydra_logging=none",
    "hydra/job_logging=none",
)
_SWEPT = "MPAR_SWEPT"
"""The keys that have several values in the sweep, as the processes of its jobs get them."""


def sweep(arguments: Arguments) -> int:
    """Train once for every combination of values, then print a table of the results; returns the exit code.

    Hydra alone decides in which process a job runs. Raises ConfigError, before the first job, for whatever is wrong with any.
    """
    checked = check_overrides("train", TrainConfig, arguments.overrides, arguments.user_dir, multirun=True)
    with hydra_ready(checked, arguments.user_dir) as overrides:
        _check_jobs(overrides)
        folder = _sweep_folder(overrides)
        where = [] if folder is None else [f"hydra.sweep.dir='{folder}'"]
        where.append(f"+hydra.job.env_set.{_SWEPT}='{' '.join(_swept_keys(overrides))}'")
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        batches = hydra.multirun("train", train_job, [*_SETTINGS, *where, *overrides])
    jobs = [job for batch in batches or () for job in batch]
    results = [job.return_value for job in jobs]
    if results:
        report_sweep(results, Path(str(jobs[0].hydra_cfg.hydra.sweep.dir)))
    failed = [result.name for result in results if result.failed]
    if failed:
        say_aside(f"jobs that failed: {', '.join(failed)}")
    return 1 if failed else 0


def train_job(composed: DictConfig) -> JobResult:
    """Run one job of a sweep, in the process that Hydra's launcher chose. What it raises is shown, and is no end of the sweep."""
    settings = HydraConfig.get()
    output_dir, began = Path(settings.runtime.output_dir), time.perf_counter()
    name, overrides = output_dir.name, tuple(settings.overrides.task)
    say_aside(f"--- job {name}: {' '.join(overrides)}")
    run_dir, failed, done, records = output_dir, False, False, []
    try:
        config, resolved = bind_run(plain_config(composed), run_problems)
        if config.run_dir is not None and Path(config.run_dir).absolute() != output_dir.absolute().parent:
            run_dir = Path(config.run_dir) / name
        config = dataclasses.replace(config, run_dir=str(run_dir))
        with signals_stop():  # Hydra's launcher may have started another process
            trained = _steps_done(config, resolved, settings.job.env_set.get(_SWEPT, "").split()) >= config.steps
            records = read_metrics(run_dir / "metrics.jsonl")  # of this job, should it fail now
            done = trained and finished_steps(run_dir) >= config.steps
            if done:
                say_aside(f"job {name} is done already: {run_dir}")
            else:
                train_once(config, resolved, sweep=run_dir.parent, trained=trained)
            records = read_metrics(run_dir / "metrics.jsonl")
    except BrokenPipeError:  # nobody reads the output any more, which is no failure of the job
        give_output_up()
    except Exception as error:  # of a bug, too, the traceback is shown, and the next job begins
        show_error(error)
        failed = True
    time_s = None if done else time.perf_counter() - began
    return JobResult(name, overrides, str(run_dir), failed, time_s, records)


def _steps_done(config: TrainConfig, resolved: PlainConfig, swept: Sequence[str]) -> int:
    """How many steps of the job an earlier run of this sweep has done. Raises CheckpointError if the folder of the job has
    checkpoints of another job: folders of jobs have numbers for names.
    """
    if not Path(str(config.run_dir), "checkpoints").exists():  # then torch need not be loaded
        return 0
    done: int = later("mpar.train").steps_done(config, with_absolute_paths(resolved, Path.cwd()), swept)
    return done


def _sweep_folder(overrides: Sequence[str]) -> Path | None:
    """The folder of the sweep: `run_dir` if it has one value, else a new one. None if an override says it to Hydra."""
    parsed = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(list(overrides))}
    if "hydra.sweep.dir" in parsed:
        return None
    given = parsed.get("run_dir")
    if given is not None and not given.is_sweep_override() and isinstance(given.value(), str):
        return Path(str(given.value()))
    return new_folder("runs/sweep_")


def _swept_keys(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that have several values."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed if override.is_sweep_override()]


def _check_jobs(overrides: Sequence[str]) -> None:
    """Raise ConfigError with everything that is wrong with any job, as far as its values and files tell.

    Only the jobs that the overrides spell out are known here: other sweepers than Hydra's own choose values as they go.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if any(override.key_or_group == "hydra/sweeper" for override in parsed):
        return
    values = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [str(override.input_line)]
        for override in parsed
        if not override.key_or_group.startswith("hydra") or override.key_or_group == "hydra.searchpath"
    ]
    jobs_of_problem: dict[str, list[int]] = defaultdict(list)
    jobs = list(itertools.product(*values))
    for number, job in enumerate(jobs):
        try:
            bind_run(plain_config(compose("train", overrides=list(job))), run_problems)
        except ConfigError as error:
            for line in str(error).splitlines()[1:] or [str(error)]:
                jobs_of_problem[line.strip()].append(number)
    if jobs_of_problem:
        lines = [f"job {', '.join(map(str, numbers))}: {line}" for line, numbers in jobs_of_problem.items()]
        raise ConfigError(f"of the {len(jobs)} jobs of the sweep, some have values that cannot be used:{listed(lines)}")
