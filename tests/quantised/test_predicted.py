"""The memory of QLoRA on large models, predicted."""

import math

import pytest

from mpar import Mesh, adapters, models
from mpar.adapters import LoRA
from mpar.compiler import policy
from mpar.kernels import Kernels
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.quantised import quantise
from tests.program.test_experts import spread

LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA_7B |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}
QWEN3_235B = {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94}
QWEN3_235B |= {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
QWEN3_235B |= {"max_position_embeddings": 40960, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_235B |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.0}
CASES = {
    "7B on one GPU": (LLAMA_7B, Mesh(dp=1), "ddp", 1, 8e9),
    "235B on eight GPUs": (QWEN3_235B, Mesh(fsdp=8), spread(8, "zero3"), 8, 30e9),
}


LARGE = pytest.param("235B on eight GPUs", marks=pytest.mark.full("it compiles a model of 94 layers"))


@pytest.mark.parametrize("name", ["7B on one GPU", LARGE])
def test_what_a_rank_needs(name):
    """LoRA of rank 16 of all linear layers and experts beside nf4, 2,048 tokens a rank, everything recomputed."""
    config, mesh, strategy, rows, bound_bytes = CASES[name]
    model = quantise(adapters.add(models.from_config(config, logits_chunk=1024), LoRA(rank=16, alpha=32)))
    how = {"precision": "bf16", "recompute": policy("full"), "kernels": Kernels("auto", "sm_90")}
    program = compile_step(model, AdamW(lr=1e-4), mesh, strategy, (rows, 2048), **how)
    codes = sum(math.prod(layout.shape) for layout in model.layouts.values()) * 4.127 / 8 / mesh.size
    assert codes < program.predict().need_bytes < bound_bytes
