"""`mpar train` of models with experts, and of shared sequences, on real processes."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from mpar import models, testing
from mpar.train import read_metrics
from tests.cli.conftest import run_mpar

pytestmark = pytest.mark.gloo
SHORT = ["data.batch_size=4", "task.max_new_tokens=2", "task.chat=[hi]", "num_threads=1", "tensorboard=false", "progress=false"]
QWEN3_MOE = ["train", "model=tiny_qwen3_moe", *SHORT, "model.router.kind=balanced", "steps=6"]  # no choice hangs on a last bit
DEEPSEEK_V3 = ["train", "model=tiny_deepseek_v3", *SHORT, "steps=4"]


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """6 steps on 4 ranks that share sequences, storage and experts, with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("moe")
    how = ["mesh=fsdp2_cp2", "strategy=zero3", "strategy.expert_parallel=4", "checkpoint={every: 3, keep: null}", "run_dir=run"]
    done = run_mpar([*QWEN3_MOE, *how], folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


def test_what_a_run_with_experts_leaves(qwen3_moe):
    """A picture of their load and their numbers in every record; the chat is on the screen."""
    run_dir, done = qwen3_moe
    assert "user       hi\nassistant" in done.stdout
    assert f"expert load  {run_dir.name}/experts.png" in done.stdout
    assert (run_dir / "experts.png").read_bytes()[:4] == b"\x89PNG"
    for record in read_metrics(run_dir / "metrics.jsonl"):
        assert record["aux_loss"] > 0
        assert record["dropped"] == 0
        assert 1 <= record["max_load"] < 2  # balanced, but for the padding, which goes nowhere
        assert 0.9 < record["entropy/layers.0"] <= 1


@pytest.mark.full("its runs take 10 s; tests/cli/test_train.py resumes one without experts")
def test_ranks_change_nothing_and_neither_does_resuming(qwen3_moe, tmp_path):
    """2 ranks go on from the checkpoint of 4, experts on ranks that shared sequences: the losses are those of the first run."""
    run_dir, _ = qwen3_moe
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(run_dir / "checkpoints" / "step_00000003", tmp_path / "run" / "checkpoints" / "step_00000003")
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "run")
    how = ["mesh=cp2", "strategy=zero1", "strategy.context_parallel=all_to_all", "strategy.expert_parallel=2", "run_dir=run"]
    done = run_mpar([*QWEN3_MOE, *how, "strategy.dispatcher=all_gather"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on from run/checkpoints/step_00000003" in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(run_dir), rel=1e-5)


@pytest.mark.full("two runs take 25 s; tests/program/test_padded_experts.py compares their steps")
def test_padded_experts_learn_as_ragged_ones(tmp_path, mpar):
    """Groups of 4 ranks, experts padded to their capacity, tokens exchanged between processes: the losses are one rank's."""
    short = [*QWEN3_MOE, "steps=3", "data.batch_size=4", "model.router.capacity_factor=1.5"]
    ranks = ["mesh=fsdp2_cp2", "strategy=zero3", "strategy.expert_parallel=4", "strategy.sequence=contiguous"]
    done = mpar(*short, *ranks, "model.router.padded=true", "model.router.group=rank", "run_dir=four")
    assert done.returncode == 0, done.stderr
    alone = mpar(*short, "mesh=one", "strategy=ddp", "model.router.token_groups=[2,2]", "run_dir=one")
    assert alone.returncode == 0, alone.stderr
    four, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("four", "one"))
    for key in ("loss", "aux_loss"):
        assert [record[key] for record in four] == pytest.approx([record[key] for record in one], rel=1e-5)
    assert len(four) == 3 and all(record["dropped"] == 0 for record in four)


def test_transformers_loads_the_experts(qwen3_moe):
    """The HF folder gives the same logits in transformers."""
    run_dir, _ = qwen3_moe
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    model, params = models.from_hf(run_dir / "hf")
    tokens_BS = torch.randint(250, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        testing.assert_close(model.apply(params, tokens_BS), theirs(tokens_BS).logits, name="logits", rtol=1e-5)


@pytest.mark.full("its runs take 30 s; the run above has experts too")
def test_latent_attention_and_shared_experts(mpar, tmp_path):
    """A DeepSeek-V3 on 4 ranks with tensor parallelism begins as on one, learns, and answers."""
    how = ["mesh=cp2_tp2", "strategy=zero1_tp_sp", "strategy.expert_parallel=2", "model.mlp_chunk=32", "evaluation.fraction=0.1"]
    done = mpar(*DEEPSEEK_V3, *how, "run_dir=four")
    assert done.returncode == 0, done.stderr
    alone = mpar(*DEEPSEEK_V3, "mesh=one", "strategy=ddp", "evaluation.fraction=0.1", "run_dir=one")
    assert alone.returncode == 0, alone.stderr
    four, one = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("four", "one"))
    assert four[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert four[0]["seq_aux_loss"] == pytest.approx(one[0]["seq_aux_loss"], rel=1e-4)
    assert four[-1]["loss"] < four[0]["loss"]
    assert four[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], rel=1e-2)
    assert "assistant" in done.stdout
    assert mpar("generate", "path=four", "prompt=hi", "max_new_tokens=2").returncode == 0
