"""Mamba-2 against transformers: logits, gradients, weights both ways, generation; and its config key by key."""

import dataclasses
import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mpar import models, testing, tree
from mpar.errors import ConfigError
from mpar.infer.compile import generate

BASE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}
VARIANTS = {
    "plain": {},
    "one_group": {"n_groups": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"use_bias": True},
    "no_conv_bias": {"use_conv_bias": False},
    "limits": {"time_step_limit": (0.2, 1.5)},
    "lower_limit": {"time_step_limit": (0.3, math.inf)},
    "width": {"conv_kernel": 2},
    "expand": {"expand": 3, "num_heads": 6},
    "one_chunk": {"chunk_size": 256, "layer_norm_epsilon": 1e-2},
    "vocab_128": {"vocab_size": 128},
}
TOKENS = torch.randint(61, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def make_folder(tmp_path):
    """`fn(**config)` gives (folder of a saved model of transformers with every parameter drawn, the model)."""

    def make(**config):
        reference = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**BASE, **config})).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                centre = 1.0 if "norm" in name or name.endswith(".D") else 0.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
        reference.save_pretrained(tmp_path / "hf")
        return tmp_path / "hf", reference

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant, make_folder):
    """Logits agree to 1e-5 and the gradient of every parameter to 1e-4, under its Hugging Face name."""
    folder, reference = make_folder(**VARIANTS[variant])
    model, params = models.from_hf(folder)
    expected = reference(TOKENS).logits
    testing.assert_close(model.apply(params, TOKENS), expected, name="logits", rtol=1e-5)
    labels = TOKENS.roll(-1, 1)
    mean = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    mean.backward()
    leaves, structure = tree.flatten(params)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    loss, weight = model.loss(tree.unflatten(structure, leaves), {"tokens": TOKENS, "labels": labels})
    testing.assert_close(loss / weight, mean, name="loss", rtol=1e-5)
    grads = models.hf_tensors(model, tree.unflatten(structure, torch.autograd.grad(loss / weight, leaves)))
    named = dict(reference.named_parameters())
    assert set(grads) == set(named)
    for name, parameter in named.items():
        testing.assert_close(grads[name], parameter.grad, name=name, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_is_the_import(variant, make_folder, tmp_path):
    """Weights written are, bit for bit, those read; transformers loads the folder and computes what it computed before."""
    folder, reference = make_folder(**VARIANTS[variant])
    model, params = models.from_hf(folder)
    models.to_hf(model, params, tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert tuple(loaded.config.time_step_limit) == tuple(reference.config.time_step_limit)
    assert torch.equal(loaded(TOKENS).logits, reference(TOKENS).logits)


@pytest.mark.parametrize("variant", ["plain", "one_group", "tied", "biases", "width"])
def test_greedy_generation_equals_transformers(variant, make_folder):
    """From state to state the tokens are those of transformers' greedy generation with its cache."""
    folder, reference = make_folder(**VARIANTS[variant])
    model, params = models.from_hf(folder)
    for length in (1, 2, 9):
        prompt = TOKENS[:, :length]
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert torch.equal(generate(model, params, prompt, 12), expected)


def test_steps_give_the_logits_of_the_whole(make_folder):
    """In float64, with limits on the steps too: pieces of a row from state to state, and the row at once."""
    folder, _ = make_folder(time_step_limit=(0.2, 1.5))
    model, params = models.from_hf(folder, dtype=torch.float64)
    state, parts = None, []
    for piece in TOKENS.split([5, 1, 1, 14], 1):
        logits, state = model.decode(params, piece, state)
        parts.append(logits)
    testing.assert_close(torch.cat(parts, 1), model.apply(params, TOKENS))


def test_models_that_need_the_whole_row_do_not_decode():
    """Where rotations of all tokens change with the length of the row, `decode` says so."""
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
    rope = {"rope_type": "dynamic", "factor": 2.0}
    model = models.build("llama", {**sizes, "max_position_embeddings": 8, "rope_parameters": rope})
    with pytest.raises(ConfigError, match="needs the whole row"):
        model.decode(model.init(0), TOKENS)


def test_documents_are_apart(make_folder):
    """Packed documents give the logits that each has alone."""
    folder, _ = make_folder()
    model, params = models.from_hf(folder, dtype=torch.float64)
    documents = torch.tensor([[0] * 8 + [1] * 13, [0] * 20 + [-1]])
    logits = model.apply(params, TOKENS, documents=documents)
    testing.assert_close(logits[:1, 8:], model.apply(params, TOKENS[:1, 8:]), name="second document")
    testing.assert_close(logits[1:, :20], model.apply(params, TOKENS[1:, :20]), name="before padding")


def test_sharded_reading_is_the_slice(make_folder):
    """A rank reads its heads and groups out of the joined tensors."""
    folder, _ = make_folder()
    model, params = models.from_hf(folder)
    with models.HfReader(model, folder) as reader:
        cuts = {"x_DNH": (1, slice(2, 4)), "c_DGK": (1, slice(1, 2)), "dt_DN": (1, slice(1, 3)), "conv_b_GKW": (0, slice(1, 2))}
        for name, (dim, cut) in cuts.items():
            leaf = getattr(params.layers[1].mamba, name)
            slices = [slice(None)] * leaf.ndim
            slices[dim] = cut
            assert torch.equal(reader.read_leaf(f"layers.1.mamba.{name}", slices), leaf[tuple(slices)])


def test_fresh_models_begin_as_those_of_transformers():
    """Means and spreads of every leaf that is drawn are those of transformers' own start, and what is set is equal."""
    config = {**BASE, "hidden_size": 64, "num_heads": 16, "n_groups": 1, "state_size": 32, "rescale_prenorm_residual": True}
    model = models.build("mamba2", config)
    torch.manual_seed(0)
    reference = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**config))
    ours = models.hf_tensors(model, model.init(0))
    for name, theirs in reference.state_dict().items():
        if name.endswith(("A_log", ".D", "norm.weight", "bias", "norm_f.weight")) and "dt_bias" not in name:
            testing.assert_close(ours[name], theirs, name=name)
            continue
        if "dt_bias" in name:
            steps = [torch.nn.functional.softplus(x.double()) for x in (ours[name], theirs)]
            assert all(x.min() > 9e-4 and x.max() < 0.11 for x in steps)
            continue
        assert abs(float(ours[name].std() / theirs.std()) - 1) < 0.15, name
        assert abs(float(ours[name].abs().max() / theirs.abs().max()) - 1) < 0.35, name


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 3}, r"expand \* hidden_size is 32, num_heads \* head_dim is 24"),
        ({"n_groups": 3}, "num_heads=4 is not a multiple of n_groups=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu', 'swish' are implemented"),
        ({"time_step_limit": [0.1]}, "time_step_limit=.*: must be two numbers"),
        ({"time_step_limit": [0.1, "high"]}, "time_step_limit=.*: must be two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, "dt_limits"),
        ({"rms_norm_eps": 1e-5}, "unknown keys: rms_norm_eps"),
        ({"num_heads": 3, "time_step_limit": None}, r"(?s)time_step_limit=None"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_are_refused(change, match):
    """With the key and what it must be."""
    with pytest.raises(ConfigError, match=match):
        models.build("mamba2", {**BASE, **change})


def test_every_key_of_transformers_is_known(make_folder):
    """A config.json with every key that transformers writes is read, and each key of the mathematics changes the model."""
    folder, _ = make_folder()
    raw = json.loads((folder / "config.json").read_text())
    base = models.from_config(raw).config
    changes = {
        "layer_norm_epsilon": 1e-3, "state_size": 5, "conv_kernel": 3, "n_groups": 4, "use_bias": True, "use_conv_bias": False,
        "chunk_size": 4, "time_step_limit": [0.1, 0.2], "time_step_min": 0.01, "time_step_max": 0.2, "time_step_floor": 0.1,
        "rescale_prenorm_residual": True, "initializer_range": 0.3, "tie_word_embeddings": True, "num_hidden_layers": 3,
    }  # fmt: skip
    for key, value in changes.items():
        assert models.from_config({**raw, key: value}).config != base, key
    for key, value in {"residual_in_fp32": False, "time_step_rank": 7, "use_cache": False}.items():
        assert models.from_config({**raw, key: value}).config == base, key


def test_sequences_keep_their_order():
    """A model with mamba layers, be there others too, reads no order, so that no strategy permutes its sequences."""
    model = models.build("mamba2", BASE)
    assert "order" not in model.batch_axes
    assert dataclasses.replace(model, dtype=torch.float64).batch_axes["tokens"] == ("batch", "seq")
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = models.build("llama", {**sizes, "max_position_embeddings": 32})
    layers = (*model.config.layers, *llama.config.layers)
    mixed = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=layers, ropes=llama.config.ropes))
    assert "order" not in mixed.batch_axes and "order" in llama.batch_axes
    assert mixed.apply(mixed.init(0), TOKENS).shape == (2, 21, 61)
