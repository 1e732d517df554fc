"""`mpar train`: compose, prepare once, start the ranks, then export, draw and chat. With `-m`, once for every job of a sweep."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from mpar.cli._compose import bind_composed, check_overrides, compose_config, conf_dir, describe_config
from mpar.cli._finish import finish
from mpar.cli._launch import launch
from mpar.cli._prepare import prepare_job
from mpar.cli._run_dir import new_run_dir
from mpar.cli._screen import say, say_aside, show_error
from mpar.errors import MparError
from mpar.train import TrainConfig

__all__ = ["main"]

_HELP = """usage: mpar train [group=choice] [key=value] ... [-m]

Starts one process for each rank of the mesh on this machine; under torchrun it is one of torchrun's processes.
Leaves in run_dir: config.yaml, program.txt, metrics.jsonl, checkpoints/, loss.png, experts.png, hf/, tensorboard/.
-m, --multirun: values with commas are a sweep; each job trains in a folder of its own below runs/."""


def main(args: Sequence[str]) -> int:
    """Train; returns the exit code."""
    overrides = [arg for arg in args if arg not in ("-m", "--multirun")]
    if "-h" in overrides or "--help" in overrides:
        shown = [arg for arg in overrides if arg not in ("-h", "--help")]
        say(f"{_HELP}\n\n{describe_config('train', TrainConfig, shown)}")
        return 0
    if len(overrides) < len(args):
        return _sweep(overrides)
    config, resolved = compose_config("train", TrainConfig, overrides)
    train(config, resolved)
    return 0


def train(config: TrainConfig, resolved: dict) -> None:
    """One run, from configuration to chat."""
    began = time.perf_counter()
    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=new_run_dir())
    resolved = resolved | {"run_dir": config.run_dir}
    with tempfile.TemporaryDirectory(prefix="mpar-") as folder:  # mkdtemp: for this user's eyes only
        prepared = prepare_job(config, resolved, Path(folder))
        say_aside(f"{prepared.summary}\nprepared in {time.perf_counter() - began:.1f} s")
        launch(prepared.job, Path(folder))
    finish(config)


def _sweep(overrides: Sequence[str]) -> int:
    """Hydra's multirun: its sweeper splits the overrides, its launcher calls `job` for each; both may be plugins."""
    overrides = check_overrides("train", TrainConfig, overrides)
    failed: list[str] = []

    def job(composed: DictConfig) -> None:
        name = Path(HydraConfig.get().runtime.output_dir).name
        say_aside(f"--- job {name}: {' '.join(HydraConfig.get().overrides.task)}")
        try:
            config, resolved = bind_composed(TrainConfig, composed)
            if config.run_dir is None:
                config = dataclasses.replace(config, run_dir=HydraConfig.get().runtime.output_dir)
            else:
                config = dataclasses.replace(config, run_dir=str(Path(config.run_dir) / name))
            train(config, resolved)
        except MparError as error:
            show_error(error)
            failed.append(name)

    settings = [
        "hydra.sweep.dir=runs/sweep_${now:%Y-%m-%d_%H-%M-%S}",
        "hydra.sweep.subdir=${hydra.job.num}",
        "hydra.output_subdir=null",
        "hydra.job.name=train",
        "hydra/hydra_logging=none",
        "hydra/job_logging=none",
    ]
    argv, sys.argv = sys.argv, ["mpar train", "-m", *settings, *overrides]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="train", version_base="1.3")(job)()
    finally:
        sys.argv = argv
    if failed:
        say_aside(f"jobs that failed: {', '.join(failed)}")
    return 1 if failed else 0
