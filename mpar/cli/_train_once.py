"""One run of `mpar train` on this machine: prepares it, starts the ranks, then exports the model, draws pictures and asks it."""

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
    """Do all of one run: prepare, train, export, draw, and ask the trained model."""
    began = time.perf_counter()
    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=new_run_dir())
    resolved = resolved | {"run_dir": config.run_dir}
    with tempfile.TemporaryDirectory(prefix="mpar-") as folder:  # readable by this user only
        prepared = prepare_job(config, resolved, Path(folder))
        say_aside(f"{prepared.summary}\nprepared in {time.perf_counter() - began:.1f} s")
        launch(prepared.job, Path(folder))
    finish(prepared.setup, prepared.tokenizer)
