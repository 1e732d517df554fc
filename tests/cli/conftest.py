"""Runs of the command line in processes of their own, on a model that trains in milliseconds."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S

SMALL = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.head_dim=8",
    "data.seq_len=128",
    "data.batch_size=4",
    "task.max_new_tokens=4",
    "task.chat=[hi]",
    "num_threads=1",
    "tensorboard=false",
]
Run = Callable[..., subprocess.CompletedProcess]


def environment() -> dict[str, str]:
    """That of this process, with this checkout first on the path."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}


def run_mpar(
    args: Sequence[str], folder: Path, *, launcher: Sequence[str] = ("-m", "mpar"), timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess:
    """`mpar ARGS` in `folder`; its output is text."""
    command = [sys.executable, *launcher, *args]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture
def mpar(tmp_path: Path) -> Run:
    """`mpar("train", "steps=3", ...)` in a folder of the test's own."""
    return lambda *args, **how: run_mpar(args, tmp_path, **how)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """A finished run of 8 steps on 2 ranks, with checkpoints at 4 and 8: its run_dir and what it printed."""
    folder = tmp_path_factory.mktemp("small")
    done = run_mpar(["train", *SMALL, "steps=8", "checkpoint={every: 4, keep: null}", "run_dir=run"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done
