"""What answers: folders of quantised weights, of adapters, and of both, as transformers, bitsandbytes and PEFT have them."""

import json
import warnings

import bitsandbytes
import peft
import pytest
import torch
import transformers

from mpar import models
from mpar.data import byte_tokenizer
from mpar.errors import ConfigError
from mpar.infer import Sampling
from mpar.train.answers import load_assistant
from tests.cli.conftest import run_mpar

LLAMA = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 259, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [[72, 105], [66, 121, 116, 101, 115, 32, 97, 114, 101], [33]]


def saved(folder, module):
    """The folder of a module of transformers, with a tokenizer of bytes."""
    module.save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of weights, one of the same in nf4 that bitsandbytes wrote, and two of PEFT with adapters of them."""
    root = tmp_path_factory.mktemp("answers")
    torch.manual_seed(0)
    plain = saved(root / "plain", transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    read = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=four_bits, device_map="cpu", dtype=torch.float32
    )
    saved(root / "nf4", read)
    for name, init in (("lora", False), ("pissa", "pissa")):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(plain), config)
            for path, leaf in adapted.named_parameters():
                if "lora_" in path:
                    leaf.add_(torch.randn_like(leaf) * 0.1)
            adapted.save_pretrained(root / name)
    return root


def greedy(module: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The eight likeliest tokens behind a prompt, computed by transformers."""
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        out = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def answers(folder, adapter=None) -> list[list[int]]:
    """The same tokens of mpar."""
    _, assistant = load_assistant(folder, rows=3, adapter=None if adapter is None else str(adapter))
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    asked = [assistant.continue_tokens(prompt, sampling) for prompt in PROMPTS]
    for _ in assistant.run():
        pass
    return [answer.request.answer for answer in asked]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("base", "adapter"), [("nf4", None), ("plain", "lora"), ("plain", "pissa"), ("nf4", "lora")])
def test_tokens_are_those_of_transformers(folders, base, adapter):
    """Of bitsandbytes on the CPU, of PEFT, which takes a PiSSA adapter out of the weights, and of PEFT on bitsandbytes."""
    module = transformers.AutoModelForCausalLM.from_pretrained(folders / base, device_map="cpu", dtype=torch.float32).eval()
    for layer in module.modules():  # on some CPUs bitsandbytes would round magnitudes to bfloat16
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    if adapter is not None:
        with warnings.catch_warnings(action="ignore"):
            module = peft.PeftModel.from_pretrained(module, folders / adapter).eval()
    found = answers(folders / base, adapter and folders / adapter)
    assert found == [greedy(module, prompt) for prompt in PROMPTS]
    others = answers(folders / "plain") if adapter is None or base == "plain" else answers(folders / base)
    assert found != others


@pytest.mark.gloo
@pytest.mark.full("four launches; tests/models/test_cached.py simulates the programs on meshes")
def test_commands_read_codes_and_adapters(folders, tmp_path):
    """What `mpar generate` and `mpar eval` say is the same on two ranks, each of which reads its parts of codes and matrices."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"question": "What are swans?", "answer": "Birds, and white."}) + "\n")
    how = [f"path={folders / 'nf4'}", f"adapter={folders / 'lora'}"]
    ask, measure = ["prompt=Hi", "max_new_tokens=6", "temperature=0"], ["sets=[texts.jsonl]", "out=out.json"]
    answers, losses = [], []
    for mesh in (["mesh=one"], ["mesh=tp2"]):
        done = run_mpar(["generate", *how, *mesh, *ask], tmp_path)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    for mesh in (["mesh=one"], ["mesh=fsdp2", "strategy=zero3"]):
        done = run_mpar(["eval", *how, *mesh, *measure], tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / "out.json").read_text())["sets"]["texts.jsonl"]["loss"])
    assert answers[0] == answers[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_length_bounds_a_prompt_and_its_answer(folders, tmp_path):
    """As asked for; but not beyond the positions that a model has learned."""
    _, assistant = load_assistant(folders / "plain", length=24)
    with pytest.raises(ConfigError, match="24 tokens"):
        assistant.continue_tokens([1] * 24, Sampling(max_tokens=8))
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 259}
    model = models.build("gpt2", sizes)
    models.to_hf(model, model.init(0), tmp_path)
    with pytest.raises(ConfigError, match=r"length=24: this model has learned 16 positions"):
        load_assistant(tmp_path, length=24)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 32),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 16}}, 32),
    ],
    ids=["plain", "linear", "dynamic", "yarn", "short yarn"],
)
def test_positions_that_a_config_states(folders, tmp_path, changes, expected):
    """Without `length` a model answers as far as its config says; beyond, one line warns, with both numbers."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 32, **changes}
    model = models.build("llama", config)
    assert models.stated_positions(model) == expected
    models.to_hf(model, model.init(0), tmp_path)
    byte_tokenizer().save(tmp_path)
    for length, room, lines in ((None, expected, 0), (expected, expected, 0), (expected + 8, expected + 8, 1)):
        warned = []
        _, assistant = load_assistant(tmp_path, length=length, warn=warned.append)
        assert (assistant.engine.runner.sizes.length, len(warned)) == (room, lines)
        assert all(f"length={length}" in line and f"made for {expected} positions" in line for line in warned)
