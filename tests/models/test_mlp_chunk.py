"""Feed-forward layers that take some tokens at a time."""

import pytest
import torch

from mpar import models, testing, tree
from mpar.errors import ConfigError

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
LLAMA = {"model_type": "llama", **SIZES}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN2_MOE = {"model_type": "qwen2_moe", **SIZES, **EXPERTS, "shared_expert_intermediate_size": 12}


def loss_and_gradients(model):
    params = tree.map_leaves(lambda leaf: leaf.requires_grad_(), model.init(0))
    tokens = torch.randint(40, (2, 10), generator=torch.Generator().manual_seed(1))
    loss, _ = model.loss(params, {"tokens": tokens, "labels": tokens.flip(1)})
    return loss.detach(), torch.autograd.grad(loss, tree.leaves(params))


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"hidden_act": "gelu"}, QWEN2_MOE], ids=["llama", "gelu", "qwen2_moe"])
def test_a_tile_at_a_time_is_the_same_function(config):
    """Loss and gradients of a model in float64 do not depend on the tile, which need not divide the tokens."""
    whole = models.from_config(config, dtype=torch.float64)
    tiled = models.from_config(config, dtype=torch.float64, mlp_chunk=7)
    (loss, grads), (expected, expected_grads) = loss_and_gradients(tiled), loss_and_gradients(whole)
    testing.assert_close(loss, expected, name="loss")
    for path, grad, expected_grad in zip(tree.paths(whole.abstract_params), grads, expected_grads, strict=True):
        testing.assert_close(grad, expected_grad, name=path)


@pytest.mark.parametrize(
    ("config", "chunk", "told"),
    [
        (LLAMA, 0, "must be a positive int"),
        (LLAMA | {"mlp_bias": True}, 8, "have biases"),
        ({"model_type": "qwen3_moe", **SIZES, **EXPERTS}, 8, "no feed-forward layer that every token goes through"),
    ],
    ids=["zero", "biases", "experts alone"],
)
def test_what_cannot_be_tiled_is_refused(config, chunk, told):
    """The message says why."""
    with pytest.raises(ConfigError, match=told):
        models.from_config(config, mlp_chunk=chunk)
