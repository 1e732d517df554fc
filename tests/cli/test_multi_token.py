"""`mpar train` with multi-token prediction, on real processes: its loss, its checkpoints, the folder that it leaves."""

import itertools
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_layers import MtpModel

from mpar import checkpoint, models, testing, tree
from mpar.cli import main as command_line
from mpar.errors import CheckpointError
from mpar.train import load_params, read_metrics
from tests.cli.conftest import run_mpar

pytestmark = pytest.mark.gloo
of_four_ranks = pytest.mark.full("the run of four ranks takes half a minute; tests/program has steps of the same model")
SHORT = ["data.batch_size=4", "task.max_new_tokens=2", "task.chat=[hi]", "num_threads=1", "progress=false", "steps=6"]
TRAIN = ["train", "model=tiny_deepseek_v3", "model.config.num_hidden_layers=2", "evaluation.fraction=0.1", *SHORT]
MTP = "model.mtp_loss_weight=0.3"
ONE = ["mesh=one", "strategy=ddp", "tensorboard=false"]


def records(run_dir: Path) -> list[dict]:
    return read_metrics(run_dir / "metrics.jsonl")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """6 steps on 4 ranks that share sequences, storage and experts, with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("mtp")
    how = ["mesh=fsdp2_cp2", "strategy=zero3", "strategy.expert_parallel=4", "checkpoint={every: 3, keep: null}", "run_dir=run"]
    done = run_mpar([*TRAIN, MTP, *how, "progress=true"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", done


@of_four_ranks
def test_ranks_and_the_layer_leave_the_main_loss_as_it_is(four, mpar, tmp_path):
    """The first step has the losses of one rank, where each position knows what follows it; `loss` is that without the layer."""
    run_dir, _ = four
    for name, more in (("with", [MTP]), ("without", [])):
        done = mpar(*TRAIN, *more, *ONE, "steps=1", f"run_dir={name}")
        assert done.returncode == 0, done.stderr
    ours, one, without = records(run_dir)[0], records(tmp_path / "with")[0], records(tmp_path / "without")[0]
    assert ours["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert one["loss"] == without["loss"]
    assert ours["mtp_loss"] == pytest.approx(one["mtp_loss"], rel=1e-6)
    assert "mtp_loss" not in without
    assert "max_load/mtp" not in without


@of_four_ranks
def test_the_loss_of_further_tokens_is_shown_and_falls(four):
    """It has its name on the screen, in metrics.jsonl and in the event files; evaluation is of the main loss."""
    run_dir, done = four
    losses = [record["mtp_loss"] for record in records(run_dir)]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[0] == pytest.approx(0.3 * math.log(259), rel=0.05)
    assert f"  mtp_loss {losses[-1]:.4g}  " in done.stderr
    assert any(b"mtp_loss" in file.read_bytes() for file in (run_dir / "tensorboard").iterdir())
    assert records(run_dir)[-1]["max_load/mtp"] >= 1
    assert records(run_dir)[-1]["eval_loss"] == pytest.approx(records(run_dir)[-1]["loss"], rel=0.1)


@of_four_ranks
def test_a_pipeline_goes_on_from_the_checkpoint(four, mpar, tmp_path):
    """Two stages, the layer in the last, go on from the checkpoint of 4 ranks: the losses are those of the first run."""
    run_dir, _ = four
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(run_dir / "checkpoints" / "step_00000003", tmp_path / "run" / "checkpoints" / "step_00000003")
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "run")
    done = mpar(*TRAIN, MTP, "mesh=pp2", "strategy=ddp", "tensorboard=false", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "on from run/checkpoints/step_00000003" in done.stderr
    for name in ("loss", "mtp_loss"):
        ours, theirs = ([record[name] for record in records(folder)] for folder in (tmp_path / "run", run_dir))
        assert ours == pytest.approx(theirs, rel=1e-4), name
    assert records(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(records(run_dir)[-1]["eval_loss"], rel=1e-4)


@of_four_ranks
def test_the_folder_has_the_layer(four, mpar):
    """The folder that a run leaves has the bits of its last checkpoint, layer and all; `mpar export` and `generate` know it."""
    run_dir, _ = four
    model, params = models.from_hf(run_dir / "hf", mtp_loss_weight=0.3)
    saved = load_params(model, checkpoint.latest(run_dir / "checkpoints"))
    assert all(torch.equal(leaf, tree.get(saved, path)) for path, leaf in tree.leaves_with_path(params))
    assert params.mtp.embed_DD.abs().sum() > 0
    assert json.loads((run_dir / "hf" / "config.json").read_text(encoding="utf-8"))["num_nextn_predict_layers"] == 1
    done = mpar("export", f"run_dir={run_dir}", "out=elsewhere")
    assert done.returncode == 0, done.stderr
    answers = [mpar("generate", f"path={path}", "prompt=hi", "max_new_tokens=3") for path in (run_dir, "elsewhere")]
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout


@of_four_ranks
def test_a_run_that_cannot_go_on_changes_nothing(four, mpar, tmp_path):
    """Without the layer its checkpoint is refused, in words that fit; the records of the run, which exports need, stay."""
    run_dir, _ = four
    shutil.copytree(run_dir, tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "program.txt", "metrics.jsonl")}
    done = mpar(*TRAIN, *ONE, "tensorboard=false", "run_dir=run", "steps=9")
    assert done.returncode == 1
    assert "compute another function" in done.stderr and "(not given)" in done.stderr
    assert "Restore these settings" in done.stderr
    assert "To go on from the newest checkpoint" not in done.stderr
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}


@of_four_ranks
def test_a_part_of_a_checkpoint_is_not_exported(four):
    """Parameters that the model does not have are not left out without a word."""
    run_dir, _ = four
    model, _ = models.from_hf(run_dir / "hf")
    with pytest.raises(CheckpointError, match=r"(?s)unexpected: .*params\.mtp"):
        load_params(model, checkpoint.latest(run_dir / "checkpoints"))


@of_four_ranks
def test_transformers_reads_model_and_layer(four):
    """transformers loads the folder without error, with our logits; its own further layer, loaded from it, has our loss."""
    run_dir, _ = four
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    # by itself it looks for a layer behind 61, the published number, only
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
    further = MtpModel.from_pretrained(theirs).eval()
    model, params = models.from_hf(run_dir / "hf", mtp_loss_weight=0.3)
    tokens_BS = torch.randint(250, (2, 24), generator=torch.Generator().manual_seed(0))
    labels_BS = torch.cat([tokens_BS[:, 1:], torch.full((2, 1), -100)], 1)
    batch = models.with_next_tokens({"tokens": tokens_BS, "labels": labels_BS})
    with torch.no_grad():
        out = theirs(tokens_BS, output_hidden_states=True)
        testing.assert_close(model.apply(params, tokens_BS), out.logits, name="logits", rtol=1e-5)
        positions = torch.arange(24)[None]
        hidden = further.forward_layer(0, out.hidden_states[-1], positions, None, input_ids=batch["next_tokens"])
        logits = theirs.lm_head(hidden)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["next_labels"].flatten(), reduction="sum")
        x, context, losses = None, model.context(batch), {}
        for segment in model.segments:
            x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, context, training=True)
            if segment.name == "mtp":
                testing.assert_close(losses["mtp_loss"], 0.3 * expected, name="mtp_loss", rtol=1e-5)


@of_four_ranks
def test_training_starts_from_a_folder_with_the_layer(four, mpar, tmp_path):
    """From the folder that a run left, both losses are near its last ones."""
    run_dir, _ = four
    hf = ["model=hf", f"model.path={run_dir / 'hf'}", "model.seq_len=128", *SHORT, *ONE, "steps=1"]
    done = mpar("train", *hf, MTP, "run_dir=again")
    assert done.returncode == 0, done.stderr
    first, last = records(tmp_path / "again")[0], records(run_dir)[-1]
    assert first["loss"] == pytest.approx(last["loss"], rel=0.05)
    assert first["mtp_loss"] == pytest.approx(last["mtp_loss"], rel=0.05)


def test_plan(capsys):
    """A plan counts the layer, with its batch keys; models that have none, and weights that are no weights, are refused."""
    plan = ["plan", "model=tiny_deepseek_v3", "mesh=pp2", "strategy=ddp", "lines=400"]
    assert command_line.main([*plan, MTP, "plan.rank=1"]) == 0
    assert "mtp" in capsys.readouterr().out
    assert command_line.main([*plan, "plan.rank=1"]) == 0
    assert "mtp" not in capsys.readouterr().out
    for wrong, words in (
        (["model=tiny_llama", MTP], "asks for a layer for further tokens, which llama models do not have (deepseek_v3 ones do)"),
        (["model=tiny_deepseek_v3", "model.mtp_loss_weight=0"], "mtp_loss_weight=0.0: it must be positive"),
        (["model=tiny_deepseek_v3", "model.mtp_loss_weight=true"], "model.mtp_loss_weight=True: must be a number or null"),
    ):
        assert command_line.main(["plan", *wrong]) == 2
        assert words in capsys.readouterr().err
