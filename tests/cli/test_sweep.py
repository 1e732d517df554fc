"""Sweeps: what is refused before the first job, what is reported after the last, and launchers that start other processes."""

import csv
import re
from pathlib import Path

import pytest

from mpar.cli import main as command_line
from mpar.cli._sweep_results import JobResult, report_sweep
from tests.cli.conftest import SMALL

ALONE = [*SMALL, "mesh=one", "strategy=ddp", "task.chat=[]", "progress=false", "steps=2"]


def job(number: int, overrides: str, losses: list[float], *, failed: bool = False, **others: float) -> JobResult:
    records = [{"step": step, "loss": loss, **others} for step, loss in enumerate(losses, 1)]
    return JobResult(str(number), tuple(overrides.split()), f"runs/{number}", failed, 1.5, records)


def test_every_job_is_checked_before_the_first(capsys, tmp_path, monkeypatch):
    """A value of the last job stops the sweep; a problem of several jobs is told once, with their numbers."""
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["train", "-m", "optimizer.lr=1e-3,nan", "checkpoint.keep=1,0", "data.sources=[no.jsonl]"]) == 2
    text = capsys.readouterr().err
    assert "of the 4 jobs of the sweep" in text
    assert "job 2, 3: optimizer.lr=nan: must be a finite number" in text
    assert "job 1, 3: checkpoint.keep=0: must be at least 1" in text
    assert "job 0, 1, 2, 3: data.sources=" in text
    assert not list(tmp_path.iterdir())


def test_the_lowest_loss_is_the_best(capsys, tmp_path):
    """The table has the keys in which jobs differ; a job that failed is not the best, whatever it reached before."""
    results = [
        job(0, "++optimizer.lr=0.1 ++steps=2 mesh=one", [3.0, 2.0]),
        job(1, "++optimizer.lr=0.2 ++steps=2 mesh=one", [3.0, 1.5, 1.75]),
        job(2, "++optimizer.lr=0.3 ++steps=2 mesh=one", [1.0], failed=True),
        job(3, "++optimizer.lr=0.4 ++steps=2 mesh=one", [], failed=True),
    ]
    report_sweep(results, tmp_path)
    with (tmp_path / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["job", "optimizer.lr", "final_loss", "best_loss", "time_s", "run_dir", "status"]
    assert [(row["final_loss"], row["best_loss"], row["status"]) for row in rows] == [
        ("2.0", "2.0", "ok"), ("1.75", "1.5", "best"), ("1.0", "1.0", "failed"), ("", "", "failed"),
    ]  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if re.search(r"best +│", line)] == ["1"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_evaluations_decide_if_there_are_any(tmp_path):
    """Then the loss of training does not matter."""
    report_sweep([job(0, "seed=0", [1.0], eval_loss=3.0), job(1, "seed=1", [2.0], eval_loss=2.5)], tmp_path)
    with (tmp_path / "sweep.csv").open(encoding="utf-8") as file:
        assert [(row["best_loss"], row["status"]) for row in csv.DictReader(file)] == [("3.0", "ok"), ("2.5", "best")]


@pytest.mark.gloo
@pytest.mark.full("trains two models in other processes")
def test_joblib(mpar, tmp_path):
    """Jobs of joblib's launcher run in other processes, in `run_dir`, and no other folder is made."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    how = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optimizer.lr=1e-3,1e-2", "run_dir=both"]
    done = mpar("train", "-m", *ALONE, *how)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"both"}
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"0", "1", "multirun.yaml", "sweep.csv", "sweep.png"}
    assert len(re.findall(r"best +│", done.stdout)) == 1


@pytest.mark.gloo
@pytest.mark.full("trains three models")
def test_a_sweep_goes_on(mpar, tmp_path):
    """Started again with a value more, it trains what is not done yet; with other values it touches no job that is there."""
    assert mpar("train", "-m", *ALONE, "run_dir=both", "optimizer.lr=1e-2").returncode == 0
    trained = (tmp_path / "both" / "0" / "metrics.jsonl").read_bytes()
    more = mpar("train", "-m", *ALONE, "run_dir=both", "optimizer.lr=1e-2,1e-3")
    assert more.returncode == 0, more.stderr
    assert "job 0 is done already" in more.stderr and "job 1 is done" not in more.stderr
    with (tmp_path / "both" / "sweep.csv").open(encoding="utf-8") as file:
        assert sorted(row["status"] for row in csv.DictReader(file)) == ["best", "ok"]
    other = mpar("train", "-m", *ALONE, "run_dir=both", "optimizer.lr=5e-2,1e-3")
    assert other.returncode == 1
    assert "optimizer.lr: 0.01 -> 0.05" in other.stderr and "job 1 is done already" in other.stderr
    with (tmp_path / "both" / "sweep.csv").open(encoding="utf-8") as file:
        assert [(row["final_loss"] != "", row["status"]) for row in csv.DictReader(file)] == [(False, "failed"), (True, "best")]
    (tmp_path / "both" / "1" / "finished.json").unlink()  # as if it had been stopped while the model was exported
    (tmp_path / "both" / "1" / "hf" / "model.safetensors").unlink()
    again = mpar("train", "-m", *ALONE, "run_dir=both", "optimizer.lr=1e-2,1e-3")
    assert again.returncode == 0 and "job 0 is done already" in again.stderr, again.stderr
    assert (tmp_path / "both" / "1" / "hf" / "model.safetensors").exists()
    assert (tmp_path / "both" / "0" / "metrics.jsonl").read_bytes() == trained


@pytest.mark.gloo
@pytest.mark.full("trains a model, with the processes of W&B")
def test_wandb_offline(mpar, tmp_path: Path, monkeypatch):
    """`wandb=true` records into the run_dir; without it the package is not imported."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = mpar("train", *ALONE, "wandb=true", "run_dir=run")
    assert done.returncode == 0, done.stderr
    (recorded,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert recorded.stat().st_size > 0
    assert (tmp_path / "run" / "wandb.id").read_text() in recorded.name
