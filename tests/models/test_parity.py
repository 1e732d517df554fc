"""Our decoders against those of transformers: logits and gradients of every variant, in float32."""

import json

import pytest
import torch

from mpar import models, testing, tree

WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "llama": ("llama", {}),
    "llama_multi_query": ("llama", {"num_key_value_heads": 1}),
    "llama_multi_head": ("llama", {"num_key_value_heads": 4}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 12}),
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    "llama_vocab_128": ("llama", {"vocab_size": 128}),
    "llama_theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama_dynamic_short": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    "llama_dynamic_long": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}},
    ),
    "llama_yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    "llama_yarn_factor": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 1.5, "truncate": False, "rope_theta": 100.0},
        },
    ),
    "llama_yarn_mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "rope_theta": 1000.0}}),
    "llama_31": ("llama", {"head_dim": 16, "rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": ("qwen2", {**WINDOWS, "max_window_layers": 1}),
    "qwen2_layer_types": ("qwen2", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", {}),
    "qwen3_head_dim": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "qwen3_windows": ("qwen3", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2_untied": ("starcoder2", {"tie_word_embeddings": False, "norm_epsilon": 1e-2}),
    "starcoder2_no_biases": ("starcoder2", {"use_bias": False, "num_key_value_heads": 4}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 5}),
    "starcoder2_silu": ("starcoder2", {"hidden_act": "silu"}),
    "starcoder2_gelu": ("starcoder2", {"hidden_act": "gelu"}),
}
NUM_TOKENS = 24  # longer than the original 16 positions of the scaled variants and than the windows


def batch_of(vocab_size):
    """Random tokens, their shifted labels, some of them not counted."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (2, NUM_TOKENS), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    labels[1, :5] = -100
    return {"tokens": tokens, "labels": labels}


def to_old_layout(folder):
    """Rewrite config.json as transformers 4 wrote it: rope_theta and rope_scaling."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))


def gradients(model, params, batch):
    """The gradient of the mean loss, by autograd."""
    params = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params)
    loss, weight = model.loss(params, batch)
    grads = torch.autograd.grad(loss / weight, tree.leaves(params))
    return loss / weight, tree.unflatten(tree.flatten(params)[1], grads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant, make_folder):
    """Logits agree to 1e-5 and the gradient of every parameter to 1e-4, under its Hugging Face name."""
    kind, config = VARIANTS[variant]
    folder, reference = make_folder(kind, **config)
    model, params = models.from_hf(folder)
    batch = batch_of(model.vocab_size)
    expected = reference(batch["tokens"]).logits
    testing.assert_close(model.apply(params, batch["tokens"]), expected, name="logits", rtol=1e-5)
    mean = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    mean.backward()
    loss, grads = gradients(model, params, batch)
    testing.assert_close(loss, mean, name="loss", rtol=1e-5)
    actual = models.hf_tensors(model, grads)
    named = dict(reference.named_parameters())
    assert set(actual) == set(named)
    for name, parameter in named.items():
        testing.assert_close(actual[name], parameter.grad, name=name, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_layouts_of_the_config_are_one_model(variant, make_folder):
    """rope_theta with rope_scaling means the same as rope_parameters."""
    kind, config = VARIANTS[variant]
    folder, _ = make_folder(kind, **config)
    new = models.from_config(folder)
    to_old_layout(folder)
    assert models.from_config(folder).config == new.config


def test_float64_logits_equal_transformers(make_folder):
    """In float64 they agree to the precision of the reference's tables, which are float32."""
    folder, reference = make_folder("qwen3")
    model, params = models.from_hf(folder, dtype=torch.float64)
    tokens = batch_of(model.vocab_size)["tokens"]
    testing.assert_close(model.apply(params, tokens), reference.double()(tokens).logits, rtol=1e-6)


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "llama_dynamic_long"])
def test_given_positions_equal_transformers(variant, make_folder):
    """Positions of the data's choice feed RoPE, with dynamic scaling by the largest of them."""
    kind, config = VARIANTS[variant]
    folder, reference = make_folder(kind, **config)
    model, params = models.from_hf(folder)
    tokens = batch_of(model.vocab_size)["tokens"]
    positions = torch.stack([torch.arange(NUM_TOKENS) + 7, 2 * torch.arange(NUM_TOKENS)])
    mask = torch.ones(NUM_TOKENS, NUM_TOKENS).tril().log().expand(2, 1, -1, -1)
    expected = reference(tokens, position_ids=positions, attention_mask=mask).logits
    testing.assert_close(model.apply(params, tokens, positions=positions), expected, rtol=1e-5)
