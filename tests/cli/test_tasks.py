"""`mpar train` with pairs and labels, on real processes: what is logged, going on from a checkpoint, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mpar import checkpoint
from mpar.cli import main as command_line
from mpar.train import read_metrics
from tests.cli.conftest import run_mpar

SMALL = ["model=tiny_qwen3", "model.config.num_hidden_layers=1", "data=preferences", "data.seq_len=192", "data.batch_size=4"]
SHORT = [
    *SMALL,
    "steps=4",
    "num_threads=1",
    "tensorboard=false",
    "optimizer.lr_decay=constant",
    "optimizer.warmup_steps=0",
    "optimizer.lr=1e-3",
    "optimizer.min_ratio=null",
]
DPO = ["train", "task=dpo", "data.sources=[preferences#40]", *SHORT]
EVALUATED = ["evaluation={fraction: 0.2, every: 4}", "checkpoint={every: 2, keep: null}"]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with checkpoint.Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 steps on 2 ranks, compared with log-probabilities that were computed before the first."""
    folder = tmp_path_factory.mktemp("dpo")
    done = run_mpar([*DPO, "task.reference=columns", "mesh=fsdp2", "strategy=zero3", *EVALUATED, "run_dir=run"], folder)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stderr
    assert "rewards/accuracies" in done.stdout
    last = read_metrics(folder / "run" / "metrics.jsonl")[-1]
    assert last["eval_rewards/accuracies"] > 0.9
    assert last["eval_rewards/margins"] > 0.5
    return folder / "run"


@pytest.mark.gloo
def test_both_references_are_the_same(two, mpar, tmp_path):
    """A frozen copy on one rank gives the losses of the columns on two; the copy is neither trained nor exported."""
    done = mpar(*DPO, "mesh=one", "strategy=ddp", *EVALUATED, "run_dir=run", "model.random_init=false")
    assert done.returncode == 0, done.stderr
    ours, theirs = (read_metrics(path / "metrics.jsonl") for path in (tmp_path / "run", two))
    for name in ("loss", "rewards/margins", "logps/chosen", "grad_norm"):
        assert [record[name] for record in ours] == pytest.approx([record[name] for record in theirs], rel=1e-4, abs=1e-5)
    assert ours[-1]["eval_rewards/margins"] == pytest.approx(theirs[-1]["eval_rewards/margins"], rel=1e-4)
    first, last = (tensors(tmp_path / "run" / "checkpoints" / f"step_0000000{step}") for step in (2, 4))
    copied = [name for name in first if name.startswith("params.reference.")]
    assert copied
    assert all(torch.equal(first[name], last[name]) for name in copied)
    assert not any("reference" in name and name.startswith("opt.") for name in last)


@pytest.mark.gloo
def test_a_run_goes_on_with_the_same_bits(two, tmp_path):
    """From step 2 on, with the log-probabilities that the run keeps, although the parameters are others by now."""
    shutil.copytree(two, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    (tmp_path / "run" / "finished.json").unlink()
    done = run_mpar([*DPO, "task.reference=columns", "mesh=fsdp2", "strategy=zero3", *EVALUATED, "run_dir=run"], tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = (tensors(path / "checkpoints" / "step_00000004") for path in (two, tmp_path / "run"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.gloo
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("task", "rows"),
    [
        (
            ["task=kto", "task.reference=columns"],
            [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 3 == 0} for i in range(24)],
        ),
        (
            ["task=prm"],
            [{"prompt": f"{i}+1+1?", "completions": [f"{i + 1}.", f"{i}."], "labels": [True, False]} for i in range(24)],
        ),
        (["task=orpo"], None),
        (["task=simpo"], None),
        (["task=reward"], None),
    ],
    ids=["kto", "prm", "orpo", "simpo", "reward"],
)
def test_other_tasks(task, rows, mpar, tmp_path):
    """Their losses are finite and fall."""
    sources = ["data.sources=[preferences#40]"]
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = ["data.sources=[rows.jsonl]"]
    done = mpar("train", *task, *SHORT, *sources, "mesh=one", "strategy=ddp", "run_dir=run")
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.gloo
def test_a_model_of_rewards_tells_held_out_pairs_apart(mpar, tmp_path):
    """After ten steps from fresh parameters, on pairs that it has not seen."""
    how = ["mesh=one", "strategy=ddp", "steps=10", "evaluation={fraction: 0.2}", "run_dir=run"]
    done = mpar("train", "task=reward", *SHORT, *how)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval_rewards/accuracies"] > 0.9


REFUSED = {
    "task.answers=3": (["task=dpo", "task.answers=3"], "it must be an even number"),
    "columns of a stream": (["task=dpo", "task.reference=columns", "data.stream=true"], "a stream has no end"),
    "no adapter": (["task=dpo", "task.reference=adapter"], "there is no adapter"),
    "rows of another kind": (["task=dpo", "task.kind=sft"], "task.kind=sft with task.learn=dpo, which learns from preference"),
    "another task's option": (["task=dpo", "task.gamma=1"], "task.gamma=1.0: task.learn=dpo has the options loss, beta"),
    "no such loss": (["task=dpo", "task.loss=sigmod"], "there is no loss of pairs called sigmod"),
    "no such loss of CPO": (["task=cpo", "task.loss=hing"], "there are sigmoid, hinge, ipo, simpo"),
    "several microbatches of tokens": (["task=dpo", "schedule.num_slices=2"], "compares answers, which are not cut"),
    "no beta": (["task=dpo", "task.beta=data"], "preferences.jsonl:1: beta is missing"),
    "no margin": (["task=reward", "task.margin=data"], "margin is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path, capsys):
    """Before anything is compiled, with what to do instead."""
    overrides, message = REFUSED[case]
    assert command_line.main(["train", *overrides, *SHORT, f"run_dir={tmp_path}/run", "compile_cache=null"]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_pairs_without_rejected(tmp_path, capsys):
    """All rows are malformed, and the reason is said."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n' * 3)
    rows = f"data.sources=[{tmp_path}/rows.jsonl]"
    assert command_line.main(["train", "task=dpo", *SHORT, rows, f"run_dir={tmp_path}/run", "compile_cache=null"]) != 0
    assert "no rejected: a pair has chosen and rejected" in capsys.readouterr().err
