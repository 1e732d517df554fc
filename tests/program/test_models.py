"""Every model compiles for every mesh and strategy without an op that is computed whole on each rank."""

import pytest
import torch

from mpar import Mesh, State, models, testing, tree
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from tests.models import variants

B, S = 8, 8
BASE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "llama": {"model_type": "llama"},
    "llama_biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_one_kv_head": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 6},
    "llama_two_kv_heads": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_window_tied": {
        "model_type": "qwen2", "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
    },
    "starcoder2": {"model_type": "starcoder2", "tie_word_embeddings": False},
    "starcoder2_window_tied": {"model_type": "starcoder2", "num_key_value_heads": 1, "sliding_window": 3},
    "qwen3": {"model_type": "qwen3", "head_dim": 4},
    "qwen3_one_kv_head": {"model_type": "qwen3", "head_dim": 4, "num_key_value_heads": 1, "attention_bias": True},
}  # fmt: skip
CONFIGS = {name: {**BASE, **changes} for name, changes in VARIANTS.items()}
for _name in ("mistral", "gemma2", "gemma2_uncapped_logits", "gemma3", "gpt2", "gpt2_untied", "phi3_long_partial", "olmo2"):
    _kind, _changes = variants.VARIANTS[_name]
    CONFIGS[_name] = {"model_type": _kind, **variants.KINDS[_kind].base, **_changes}
CASES = [(name, None) for name in CONFIGS] + [(name, 8) for name in (*VARIANTS, "gemma3", "gpt2")]
MESHES = {"zero3_tp_sp": Mesh(dp=1, fsdp=2, tp=4), "zero1_tp": Mesh(dp=2, fsdp=2, tp=2), "tp": Mesh(dp=2, fsdp=1, tp=4)}


@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize(("variant", "chunk"), CASES)
def test_step_equals_one_rank(variant, strategy, chunk):
    """No op falls back to replication, and a simulated step gives the loss and gradient norm of the model itself."""
    model = models.from_config(CONFIGS[variant], dtype=torch.float64, vocab_multiple=8, logits_chunk=chunk)
    generator = torch.Generator().manual_seed(1)
    params = tree.map_leaves(
        lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64) + (leaf.ndim == 1),
        model.abstract_params,
    )
    batch = {key: torch.randint(0, 61, (B, S), generator=generator) for key in ("tokens", "labels")}
    batch["documents"] = torch.arange(S).expand(B, S) // 3
    batch["positions"] = torch.arange(S).expand(B, S) % 3
    batch["token_weights"] = torch.rand(B, S, generator=generator)
    shapes = {key: ((B, S), value.dtype) for key, value in batch.items()}
    program = compile_step(model, AdamW(lr=0.1), MESHES[strategy], strategy, shapes)
    assert program.facts.fallbacks == ()
    leaves = dict(tree.leaves_with_path(params))
    state = {f"params.{path}": leaf for path, leaf in leaves.items()}
    state |= {f"opt.{slot}.{path}": torch.zeros_like(leaf) for slot in ("m", "v") for path, leaf in leaves.items()}
    _, metrics = program.simulate(State(state), batch)
    primals = [leaf.clone().requires_grad_() for leaf in leaves.values()]
    loss, weight = model.loss(tree.unflatten(tree.flatten(params)[1], primals), batch)
    grads = torch.autograd.grad(loss / weight, primals)
    testing.assert_close(metrics["loss"], (loss / weight).detach(), name="loss")
    testing.assert_close(metrics["grad_norm"], torch.sqrt(sum(g.pow(2).sum() for g in grads)), name="gradient norm")
