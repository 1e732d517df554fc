"""A simulated step against plain torch: the loss and every gradient of a small Llama, on every mesh and strategy of 8 ranks."""

import dataclasses

import pytest
import torch

from mpar import Mesh, State, models, testing, tree
from mpar.optimizer import Optimizer
from mpar.program.compile import compile_step
from mpar.strategy import preset

B, S, V, THETA, EPS = 16, 8, 90, 10000.0, 1e-5
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
FACTORISATIONS = [(dp, fsdp, 8 // dp // fsdp) for dp in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8) if 8 % (dp * fsdp) == 0]
LEARNING_RATE = 0.25


class Recorder(Optimizer):
    """An optimizer that takes one step down and keeps the gradient as its state, where a test can read it."""

    slots = ("g",)

    def update_leaf(self, param, grad, slots, lr, step, scale, *, decays):
        return param - lr.to(param.dtype) * grad, (grad.to(param.dtype),)

    def decays(self, path, leaf):
        return False

    def scale(self, norm):
        return torch.ones_like(norm)

    def rate(self, step):
        return LEARNING_RATE


def rotate(x_BSNH):
    """Rotary position embedding; a vector's first half is paired with its second."""
    half = x_BSNH.shape[-1] // 2
    angle_SF = torch.arange(S, dtype=torch.float64)[:, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle_SF.cos()[:, None], angle_SF.sin()[:, None]
    a, b = x_BSNH[..., :half], x_BSNH[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def normalise(x, gain):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def layer(p, x):
    h = normalise(x, p.attn_norm_D)
    q, k, v = (torch.einsum("bsd,dnh->bsnh", h, w) for w in (p.attention.q_DNH, p.attention.k_DKH, p.attention.v_DKH))
    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bsnh,bmnh->bnsm", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    x = x + torch.einsum("bnsm,bmnh,nhd->bsd", scores.softmax(-1), v, p.attention.o_NHD)
    h = normalise(x, p.mlp_norm_D)
    gate = h @ p.mlp.gate_DF
    return x + (gate * gate.sigmoid() * (h @ p.mlp.up_DF)) @ p.mlp.down_FD


def reference_loss(params, batch):
    x = params.embed.table_VD[batch["tokens"]]
    for p in params.layers:
        x = layer(p, x)
    logp = (normalise(x, params.head.norm_D) @ params.head.head_DV)[..., :V].log_softmax(-1)
    counted = batch["labels"] >= 0
    return -logp.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0][counted].sum() / counted.sum()


@pytest.fixture(scope="module")
def problem():
    """The model, its parameters and a batch, and the loss and gradients that plain torch gives for them."""
    generator = torch.Generator().manual_seed(5)
    model = models.from_config(CONFIG, dtype=torch.float64)
    params = tree.map_leaves(
        lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64) + (leaf.ndim == 1),
        model.abstract_params,
    )
    batch = {key: torch.randint(0, V, (B, S), generator=generator) for key in ("tokens", "labels")}
    batch["labels"][torch.rand(B, S, generator=generator) < 0.3] = -100
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = reference_loss(tree.unflatten(structure, leaves), batch)
    grads = torch.autograd.grad(loss, leaves)
    return model, params, batch, loss.detach(), dict(zip(tree.paths(params), grads, strict=True))


def initial_state(params):
    leaves = dict(tree.leaves_with_path(params))
    return State(
        {f"params.{path}": x for path, x in leaves.items()} | {f"opt.g.{path}": torch.zeros_like(x) for path, x in leaves.items()}
    )


def assert_exact(problem, program):
    _, params, batch, loss, grads = problem
    state, metrics = program.simulate(initial_state(params), batch)
    testing.assert_close(metrics["loss"], loss, name="loss")
    for path, grad in grads.items():
        testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=f"gradient of {path}")
    norm = torch.sqrt(sum(grad.pow(2).sum() for grad in grads.values()))
    testing.assert_close(metrics["grad_norm"], norm, name="gradient norm")
    for path, leaf in tree.leaves_with_path(params):
        testing.assert_close(state.leaves[f"params.{path}"], leaf - LEARNING_RATE * grads[path], name=f"new {path}")


@pytest.mark.parametrize("reduce", ["each", "last"])
@pytest.mark.parametrize("stream", ["tp", "tp_sp"])
@pytest.mark.parametrize("zero", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("sizes", FACTORISATIONS, ids=str)
def test_step_is_exact(problem, sizes, zero, stream, reduce):
    """Loss, every gradient and the update equal plain torch's, and no op of the model falls back to replication."""
    mesh = Mesh(**dict(zip(("dp", "fsdp", "tp"), sizes, strict=True)))
    strategy = dataclasses.replace(preset(f"{zero}_{stream}"), reduce=reduce)
    program = compile_step(problem[0], Recorder(), mesh, strategy, (B, S), num_microbatches=2)
    assert program.facts.fallbacks == ()
    assert_exact(problem, program)
