"""Quantised models in whole steps: gathers of bytes, one product in a backward, and what is computed again.

`tests/adapters/test_meshes.py` has them on every mesh.
"""

import math

import pytest
import torch

from mpar import Mesh, adapters
from mpar.adapters import LoRA
from mpar.compiler import policy
from mpar.models import from_config
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.quantised import quantise
from tests.meshes import MESHES
from tests.program.oracle import BASE, VOCAB
from tests.quantised.problem import SHAPE, QuantisedProblem

LLAMA = {**BASE, "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("place", "how"),
    [("fsdp", {"recompute": policy("full")}), ("pp fsdp", {"num_slices": 2})],
    ids=["computed again", "slices"],
)
def test_step_is_exact(place, how):
    """What a backward computes again, and slices of rows, change nothing: they read the same dequantised weights."""
    lora = LoRA(rank=4, init="random", dropout=0.25)
    place = MESHES[place]
    problem = QuantisedProblem({**LLAMA, "num_hidden_layers": place.num_layers}, "nf4", lora, place.num_microbatches)
    problem.check(place.compile(problem.chain, problem.shapes, **how))


def test_gathers_are_of_bytes():
    """Under ZeRO-3 a rank gives its half of the codes, 4.125 bits of a weight, where a weight of bfloat16 would be 16."""
    config = {**LLAMA, "hidden_size": 1024, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 4}
    base = adapters.add(from_config(config, vocab_multiple=8), LoRA(rank=4))
    model = quantise(base)
    num_weights = sum(math.prod(layout.shape) for layout in model.layouts.values())
    shape = {key: (SHAPE, torch.int64) for key in ("tokens", "labels")}
    how = {"precision": "bf16", "num_microbatches": 1}
    before, after = (compile_step(each, AdamW(lr=1e-3), Mesh(fsdp=2), "zero3", shape, **how) for each in (base, model))
    saved = before.predict().communication_bytes - after.predict().communication_bytes
    assert saved == num_weights // 2 * 16 // 8 - num_weights // 2 * (4 + 8 / 64) // 8
    codes = [leaf for leaf in after.state_in if leaf.path.endswith(("codes", "absmax"))]
    assert all(leaf.spec.axes == {"fsdp"} for leaf in codes)


def test_a_backward_multiplies_once():
    """The backward of a frozen weight is one product, of the gradient with the weight; the forward is one."""
    config = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": VOCAB}
    model = quantise(adapters.add(from_config(config, vocab_multiple=8), LoRA(rank=1, targets=("q_proj",))))
    shape = {key: ((2, 512), torch.int64) for key in ("tokens", "labels")}
    program = compile_step(model, AdamW(lr=1e-3), Mesh(dp=1), "ddp", shape)
    once = 2 * (2 * 512) * sum(math.prod(layout.shape) for layout in model.layouts.values()) // 2  # of two layers
    assert products(program.kinds["layers forward"]) == products(program.kinds["layers backward"]) == once


def products(kind):
    """FLOPs of the products of a kind, without those with a matrix of rank 1."""
    uses = [op for op in kind.ops if op.matmul is not None and min(op.matmul.m, op.matmul.n, op.matmul.k) > 1]
    return sum(op.calls * op.flops for op in uses)
