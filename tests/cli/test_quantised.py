"""Runs of QLoRA with dropout, in processes: resumed to the bit, equal on another mesh, and their folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mpar import adapters, models, quantised, testing, tree
from tests.cli.conftest import SMALL

SIZES = [*(f"model.config.{key}=128" for key in ("hidden_size", "intermediate_size")), "model.config.head_dim=32"]
QLORA = [*SMALL, *SIZES, "adapter=lora", "adapter.dropout=0.2", "model.dropout=0.1", "model.quantise=nf4"]


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if "loss" in line]


@pytest.mark.full("its runs take a minute; tests/quantised and tests/program/test_dropout.py simulate steps on meshes")
def test_a_run_is_resumed_to_the_bit_and_equal_on_another_mesh(mpar, tmp_path):
    """From step 2 on the resumed run is the uninterrupted one; two ranks of ZeRO-3 and of tp have the same losses."""
    how = ["steps=4", "checkpoint={every: 2, keep: null}"]
    zero3 = [*QLORA, *how, "mesh=fsdp2", "strategy=zero3"]
    for args in ([*zero3, "run_dir=a"], [*QLORA, *how, "mesh=tp2", "strategy=tp_sp", "run_dir=b"]):
        done = mpar("train", *args)
        assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "a" / "checkpoints" / "step_00000002", tmp_path / "c" / "checkpoints" / "step_00000002")
    done = mpar("train", *zero3, "run_dir=c")
    assert done.returncode == 0, done.stderr
    first, second = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in "ac")
    assert first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())
    assert losses(tmp_path / "c") == losses(tmp_path / "a")[2:]
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-5)


def test_a_folder_of_bitsandbytes_is_trained(mpar, tmp_path):
    """Codes are read as they are; the export is the dequantised weights and the adapters."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 259}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = quantised.quantise(models.from_config(config))
    parts = model.init(3)
    quantised.write_quantised(model, parts, tmp_path / "base")
    how = [
        "mesh=one",
        "strategy=ddp",
        "run_dir=run",
        "data.tokenizer=bytes",
        "data.seq_len=128",
        "data.batch_size=2",
        "steps=2",
        "task.chat=[hi]",
    ]
    done = mpar(
        "train",
        "model=hf",
        "model.path=base",
        "model.quantise=nf4",
        "adapter=lora",
        "mesh=one",
        "strategy=ddp",
        *how,
        "run_dir=run",
    )
    assert done.returncode == 0, done.stderr
    plain, trained = models.from_hf(tmp_path / "run" / "hf")
    adapted = adapters.add(plain, adapters.read_lora(tmp_path / "run" / "adapter"))
    base = model.dequantise_params(parts, torch.float32)
    expected = adapters.merge(adapted, adapters.read_peft(adapted, tmp_path / "run" / "adapter", base))
    for (path, x), y in zip(tree.leaves_with_path(trained), tree.leaves(expected), strict=True):
        testing.assert_close(x, y, name=path)
