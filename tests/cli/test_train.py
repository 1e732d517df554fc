"""`mpar train` on real processes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from mpar import checkpoint, models, testing
from mpar.train import read_metrics
from tests.cli.conftest import SMALL, environment

pytestmark = pytest.mark.gloo
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def numbers(run_dir: Path) -> list[tuple]:
    """What must be the same however a run was started."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for r in read_metrics(run_dir / "metrics.jsonl")]


def test_what_a_run_leaves(small_run):
    """Config, program, metrics, checkpoints, HF folder and a picture are in run_dir; the chat is on the screen."""
    run_dir, done = small_run
    assert {"config.yaml", "program.txt", "metrics.jsonl", "checkpoints", "hf", "loss.png"} <= {p.name for p in run_dir.iterdir()}
    assert [path.name for path in checkpoint.available(run_dir / "checkpoints")] == ["step_00000004", "step_00000008"]
    assert (run_dir / "program.txt").read_text(encoding="utf-8").startswith("rank 0 of 2")
    assert (run_dir / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "user       hi\nassistant" in done.stdout
    assert "step 8/8  loss" in done.stderr


def test_metrics(small_run):
    """One object a step, whose bytes sent are the program's own count and whose tokens are the labels fed so far."""
    run_dir, _ = small_run
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(record["tokens_per_s"] == pytest.approx(4 * 128 / record["step_s"]) for record in records)
    assert all(record["tokens_per_s"] == pytest.approx(2 * record["tokens_per_s_per_device"]) for record in records)
    assert all(record["flops_per_s"] > record["flops_per_s_causal"] > 0 for record in records)
    assert all(record["measured_memory_bytes"] > record["predicted_memory_bytes"] > 0 for record in records)
    assert len({record["communication_bytes"] for record in records}) == 1


def test_transformers_loads_the_export(small_run):
    """The HF folder gives the same logits in transformers, to 1e-5, and the same tokens for a conversation."""
    run_dir, _ = small_run
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dir / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "你是谁？"}], add_generation_prompt=True, return_tensors="pt"
    )
    tokens_BS = ids["input_ids"] if not isinstance(ids, torch.Tensor) else ids
    model, params = models.from_hf(run_dir / "hf")
    with torch.no_grad():
        testing.assert_close(model.apply(params, tokens_BS), theirs(tokens_BS).logits, name="logits", rtol=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one(small_run, mpar, tmp_path):
    """From the checkpoint of step 4, steps 5 to 8 and the weights have the bits of the run that was not interrupted."""
    run_dir, _ = small_run
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(run_dir / "checkpoints" / "step_00000004", tmp_path / "run" / "checkpoints" / "step_00000004")
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "run")
    done = mpar("train", *SMALL, "steps=8", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "on from run/checkpoints/step_00000004" in done.stderr
    assert numbers(tmp_path / "run") == numbers(run_dir)
    ours, theirs = ((d / "hf" / "model.safetensors").read_bytes() for d in (tmp_path / "run", run_dir))
    assert ours == theirs
    again = mpar("train", *SMALL, "steps=8", "run_dir=run")
    assert again.returncode == 1
    assert "nothing to train" in again.stderr
    other = mpar("train", *SMALL, "steps=9", "run_dir=run", "seed=1")
    assert other.returncode == 1
    assert "trained on other data" in other.stderr


@pytest.mark.full("its runs take 30 s; tests/program starts ranks by torchrun on several meshes")
def test_torchrun_gives_the_same_numbers_on_another_mesh(small_run, mpar, tmp_path):
    """4 processes under torchrun, from the checkpoint of 2 ranks: equal losses; and equal bits to our own launcher."""
    run_dir, _ = small_run
    how = [*SMALL, "steps=8", "strategy=zero3_tp_sp", "mesh=fsdp2_tp2", f"resume={run_dir}/checkpoints/step_00000004"]
    theirs = mpar("train", *how, "run_dir=theirs", launcher=(*TORCHRUN, "4", "-m", "mpar"))
    ours = mpar("train", *how, "run_dir=ours")
    assert theirs.returncode == 0, theirs.stderr
    assert ours.returncode == 0, ours.stderr
    assert numbers(tmp_path / "ours") == numbers(tmp_path / "theirs")
    for (step, loss, *_), (same_step, same_loss, *_) in zip(numbers(tmp_path / "ours"), numbers(run_dir)[4:], strict=True):
        assert (step, loss) == (same_step, pytest.approx(same_loss, rel=1e-6))


def test_a_rank_loads_no_compiler():
    """What a rank imports has neither the compiler nor what only the compiler and the launcher need."""
    code = "import sys, mpar.cli._worker; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = (
        "mpar.sharding",
        "mpar.program.compile",
        "mpar.program.jit",
        "mpar.compiler",
        "mpar.compiler.build._build",
        "mpar.train.prepare",
        "hydra",
        "omegaconf",
        "matplotlib",
    )
    heavy += ("mpar.schedules._search", "mpar.schedules._auto", "mpar.schedules._html", "mpar.schedules._names")
    heavy += ("sympy", "networkx", "torch._dynamo", "torch._inductor", "transformers")
    assert not [name for name in loaded if name.startswith(heavy)]


def test_a_sweep_runs_each_job_in_its_own_folder(mpar, tmp_path):
    """`-m` with two values trains twice, with these values, in two folders."""
    done = mpar("train", "-m", *SMALL, "mesh=one", "strategy=ddp", "steps=2", "optimizer.lr=1e-3,2e-3")
    assert done.returncode == 0, done.stderr
    folders = sorted(path.parent for path in tmp_path.glob("runs/*/*/metrics.jsonl"))
    assert [folder.name for folder in folders] == ["0", "1"]
    assert [numbers(folder)[-1][3] != 0 for folder in folders] == [True, True]
    assert numbers(folders[1])[0][3] == pytest.approx(2 * numbers(folders[0])[0][3])


def test_a_loss_that_is_not_finite_stops_the_run(mpar, tmp_path):
    """An update far too large: the step is named, nothing is saved, the exit code is 1."""
    done = mpar(
        "train", *SMALL, "steps=5", "optimizer.lr=1e30", "optimizer.clip_norm=null", "run_dir=run", "mesh=one", "strategy=ddp"
    )
    assert done.returncode == 1
    assert "mpar: NumericsError" in done.stderr
    assert "in step 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not checkpoint.available(tmp_path / "run" / "checkpoints")


def test_generate_and_export(small_run, mpar, tmp_path):
    """A checkpoint is exported to another folder, and both answer alike."""
    run_dir, _ = small_run
    (tmp_path / "mine").mkdir()
    done = mpar("export", f"run_dir={run_dir}", "out=mine/nowhere/..")
    assert done.returncode == 1 and "it exists" in done.stderr and (tmp_path / "mine").exists()
    done = mpar("export", f"run_dir={run_dir}", "out=elsewhere")
    assert done.returncode == 0, done.stderr
    answers = [mpar("generate", f"path={path}", "prompt=hi", "max_new_tokens=4").stdout for path in (run_dir, "elsewhere")]
    assert answers[0] == answers[1]
    assert json.loads((run_dir / "hf" / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3"
