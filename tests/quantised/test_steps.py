"""Quantised models in whole steps: on any mesh they compute what plain torch does with the dequantised weights."""

import math

import pytest
import torch

from mpar import Mesh, adapters, testing, tree
from mpar.adapters import LoRA
from mpar.compiler import Schedule, policy
from mpar.models import from_config
from mpar.optim import AdamW
from mpar.program import State
from mpar.program.compile import compile_step
from mpar.quantised import quantise
from tests.program.oracle import BASE, VOCAB, Problem, Recorder
from tests.program.test_experts import spread

SHAPE = (8, 16)
LLAMA = {**BASE, "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 1, "moe_intermediate_size": 128, "num_experts": 4}
MOE |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.0}


class QuantisedProblem:
    """A quantised model with adapters: its parameters, and what plain torch gives with the dequantised ones."""

    def __init__(self, config, kind, lora, num_microbatches=1):
        plain = Problem(config, SHAPE, num_microbatches=num_microbatches, adapt=lambda model: adapters.add(model, lora))
        self.model = quantise(plain.model, kind)
        smaller = tree.map_leaves(lambda leaf: leaf if leaf.ndim == 1 else 0.3 * leaf, plain.params)
        self.params = self.model.quantise_params(smaller)
        plain.params = self.model.dequantise_params(self.params, torch.float64)
        plain.differentiate()
        self.plain = plain
        self.trained = [path for path in tree.paths(self.params) if path not in self.model.frozen]

    def check(self, mesh, strategy, **how):
        count = {"num_microbatches": self.plain.num_microbatches}
        program = compile_step(self.model, Recorder(), mesh, strategy, self.plain.shapes, **count, **how)
        assert program.facts.fallbacks == ()
        leaves = {f"params.{path}": x for path, x in tree.leaves_with_path(self.params)}
        zeros = {f"opt.g.{path}": torch.zeros_like(leaves[f"params.{path}"]) for path in self.trained}
        state, metrics = program.simulate(State(leaves | zeros), self.plain.batch)
        testing.assert_close(metrics["loss"], self.plain.loss, name="loss")
        norm = torch.sqrt(sum(self.plain.grads[path].square().sum() for path in self.trained))
        testing.assert_close(metrics["grad_norm"], norm, name="gradient norm")
        for path in self.trained:
            testing.assert_close(state.leaves[f"opt.g.{path}"], self.plain.grads[path], name=path)
        assert {path for path in state.leaves if path.startswith("opt.")} == set(zeros)
        return program


@pytest.fixture(scope="module")
def dense():
    """LoRA with dropout beside nf4, in four microbatches."""
    return QuantisedProblem(LLAMA, "nf4", LoRA(rank=4, init="random", dropout=0.25), num_microbatches=4)


@pytest.fixture(scope="module")
def experts():
    """LoRA of experts beside nf4."""
    return QuantisedProblem(MOE, "nf4", LoRA(rank=2, init="random"))


PLACES = {
    "one": (Mesh(dp=1), "ddp", {"recompute": policy("full")}),
    "zero3": (Mesh(fsdp=2), "zero3", {"recompute": policy("full")}),
    "tp of a shared stream": (Mesh(tp=2), "tp_sp", {}),
    "zero3 and tp": (Mesh(fsdp=2, tp=2), "zero3_tp", {}),
    "dp and tp of two heads each": (Mesh(dp=2, tp=4), "zero1_tp_sp", {}),
    "zbv": (Mesh(pp=2, fsdp=2), "zero3", {"schedule": Schedule("zbv", None, "E|t|t|L")}),
    "ring in zigzag": (Mesh(cp=2), spread(1, "zero3", context_parallel="ring", sequence="zigzag"), {}),
    "slices": (Mesh(pp=2), "ddp", {"num_slices": 2}),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("place", PLACES)
def test_step_is_exact(place, dense):
    """Loss and gradients of adapters equal those of plain torch; nothing else has a gradient or state."""
    mesh, strategy, how = PLACES[place]
    dense.check(mesh, strategy, **how)


EXPERT_PLACES = {
    "experts over ranks": (Mesh(fsdp=2), spread(2, "zero3"), {}),
    "experts over two axes": (Mesh(dp=2, fsdp=2), spread(4, "zero3"), {}),
    "tp": (Mesh(tp=2), "tp_sp", {}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", EXPERT_PLACES)
def test_experts_are_exact(place, experts):
    """Every expert is a matrix of its own, with its own nested magnitudes."""
    mesh, strategy, how = EXPERT_PLACES[place]
    experts.check(mesh, strategy, **how)


@pytest.mark.parametrize("place", ["one", "zero3", "tp of a shared stream"])
def test_int8_is_exact(place):
    """The same for int8, and DoRA, which reads the whole weight."""
    mesh, strategy, how = PLACES[place]
    QuantisedProblem(LLAMA, "int8", LoRA(rank=4, init="random", dora=True)).check(mesh, strategy, **how)


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
