"""Our decoders against those of transformers: logits and gradients of every variant, in float32."""

import json

import pytest
import safetensors.torch
import torch

from mpar import models, testing, tree
from tests.models.variants import KINDS, VARIANTS, old_layout

ROTATING = [name for name, (kind, _) in VARIANTS.items() if KINDS[kind].rotates]
NUM_TOKENS = 24  # longer than the original 16 positions of the scaled variants and than the windows


def batch_of(vocab_size):
    """Random tokens, their shifted labels, some of them not counted."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab_size, (2, NUM_TOKENS), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    labels[1, :5] = -100
    return {"tokens": tokens, "labels": labels}


def gradients(model, params, batch):
    """The gradient of the mean loss, by autograd."""
    params = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params)
    loss, weight = model.loss(params, batch)
    grads = torch.autograd.grad(loss / weight, tree.leaves(params), materialize_grads=True)
    return loss / weight, tree.unflatten(tree.flatten(params)[1], grads)


def stored_gradients(reference, folder):
    """The gradients of a model of transformers under the names by which it stores parameters; of buffers zero."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in reference.buffers():
            buffer.zero_()
    reference.save_pretrained(folder)
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant, make_folder, tmp_path):
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
    stored = stored_gradients(reference, tmp_path / "gradients")
    assert set(actual) == set(stored)
    for name, gradient in stored.items():
        testing.assert_close(actual[name], gradient, name=name, rtol=1e-4)


@pytest.mark.parametrize("variant", ROTATING)
def test_both_layouts_of_the_config_are_one_model(variant, make_folder):
    """rope_theta with rope_scaling means the same as rope_parameters."""
    kind, config = VARIANTS[variant]
    folder, _ = make_folder(kind, **config)
    written = json.loads((folder / "config.json").read_text())
    assert models.from_config(old_layout(written)).config == models.from_config(folder).config


def test_float64_logits_equal_transformers(make_folder):
    """In float64 they agree to the precision of the reference's tables, which are float32."""
    folder, reference = make_folder("qwen3")
    model, params = models.from_hf(folder, dtype=torch.float64)
    tokens = batch_of(model.vocab_size)["tokens"]
    testing.assert_close(model.apply(params, tokens), reference.double()(tokens).logits, rtol=1e-6)


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "llama_dynamic_long", "gemma3_wide", "gpt2", "phi3_long"])
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
