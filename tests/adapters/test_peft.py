"""Adapters are those of PEFT: step by step in training, and byte by byte in folders."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mpar import adapters, testing, tree
from mpar.adapters import LoRA
from tests.adapters.peft_models import LLAMA, MOE, of_peft, save_base, save_peft, train_mpar, train_peft

CASES = {
    "lora": (LLAMA, LoRA(rank=4, alpha=8, init="gaussian"), 1.0),
    "rslora": (LLAMA, LoRA(rank=4, alpha=8, rslora=True, targets=("q_proj", "down_proj")), 1.0),
    "dora": (LLAMA, LoRA(rank=4, alpha=8, dora=True, init="random"), 1.0),
    "lora+": (LLAMA, LoRA(rank=4, alpha=8), 4.0),
    "embedding": (LLAMA, LoRA(rank=4, targets=("embed_tokens", "q_proj"), modules_to_save=("lm_head",)), 1.0),
    "patterns": (LLAMA, LoRA(rank=4, targets=r".*\.(q|v)_proj", rank_pattern={"q_proj": 2}, alpha_pattern={"0.+v_proj": 1}), 1.0),
    "pissa": (LLAMA, LoRA(rank=4, alpha=8, init="pissa", layers=(1,)), 1.0),
    "experts": (MOE, LoRA(rank=4, alpha=8, init="random"), 1.0),
    "tied": (MOE, LoRA(rank=4, targets=("embed_tokens", "v_proj"), init="random"), 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_peft(case, tmp_path):
    """20 steps of AdamW from the same values give the same losses and the same adapter; the folder comes back bit for bit."""
    config, lora, b_rate = CASES[case]
    base, params = save_base(config, tmp_path / "base")
    model = adapters.add(base, lora)
    first = adapters.first_params(model, params, seed=3)
    adapters.write_peft(model, first, tmp_path / "first")
    theirs = of_peft(tmp_path / "base", tmp_path / "first", trained=True)
    losses, last = train_mpar(model, first, b_rate)
    for step, (mine, loss) in enumerate(zip(losses, train_peft(theirs, b_rate), strict=True)):
        testing.assert_close(torch.tensor(mine), torch.tensor(loss), name=f"loss of step {step}")
    save_peft(theirs, tmp_path / "theirs")
    adapters.write_peft(model, last, tmp_path / "mine")
    mine, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("mine", "theirs"))
    copied = {name for name in other if name.endswith((".base_layer.weight", "lm_head.weight"))} - mine.keys()
    assert mine.keys() == other.keys() - copied
    for name, x in mine.items():
        assert (x - other[name]).abs().max() < 2e-4, name  # of steps of 20 * 3e-3
    back = adapters.read_peft(adapters.add(base, adapters.read_lora(tmp_path / "theirs")), tmp_path / "theirs", params)
    adapters.write_peft(model, back, tmp_path / "back")
    again = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], other[name]) for name in mine)


def test_folder_names_what_all_linear_chose(tmp_path):
    """The config of PEFT has the entries that its readers need; it reads back as the adapter that was written."""
    base, params = save_base(LLAMA, tmp_path / "base")
    model = adapters.add(base, LoRA(rank=4, alpha=32, rslora=True))
    adapters.write_peft(model, adapters.first_params(model, params, 0), tmp_path / "a", base_name="tiny")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 32, True)
    assert config["base_model_name_or_path"] == "tiny"
    again = adapters.add(base, adapters.read_lora(tmp_path / "a"))
    assert tree.paths(again.abstract_params) == tree.paths(model.abstract_params)
    assert again.adapted["default"] == model.adapted["default"]
