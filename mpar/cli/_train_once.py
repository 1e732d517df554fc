"""One run of `mpar train` on this machine: prepare once, start the ranks, then export, draw and chat."""

import dataclasses
import tempfile
import time
from pathlib import Path

from mpar.cli._finish import finish
from mpar.cli._launch import launch
from mpar.cli._prepare import prepare_job
from mpar.cli._run_dir import new_run_dir
from mpar.cli._screen import say_aside
from mpar.train import PlainConfig, TrainConfig

__all__ = ["train_once"]


def train_once(config: TrainConfig, resolved: PlainConfig) -> None:
    """One run, from configuration to chat."""
    began = time.perf_counter()
    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=new_run_dir())
    resolved = resolved | {"run_dir": config.run_dir}
    with tempfile.TemporaryDirectory(prefix="mpar-") as folder:  # mkdtemp: for this user's eyes only
        prepared = prepare_job(config, resolved, Path(folder))
        say_aside(f"{prepared.summary}\nprepared in {time.perf_counter() - began:.1f} s")
        launch(prepared.job, Path(folder))
    finish(prepared.setup, prepared.tokenizer)
