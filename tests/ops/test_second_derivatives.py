"""Second derivatives of primitives whose gradient is a primitive: by finite differences, and on sharded operands."""

import pytest
import torch
from torch.autograd import gradgradcheck
from torch.func import grad, jvp

from mpar import Mesh, P, jit, ops, testing


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


LABELS = torch.tensor([[0, 3, -100], [2, 5, 1]])
DOCUMENTS = torch.tensor([[0, 0, 1, -1]])
QUERIES = draw(1, 4, 4, 2), draw(1, 4, 2, 2, seed=1), draw(1, 4, 2, 2, seed=2)

CASES = {
    "add_layer_norm": (lambda x, r, w: ops.add_layer_norm(x, r, w), (draw(2, 4), draw(2, 4, seed=1), draw(4))),
    "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w), (draw(2, 4), draw(2, 4, seed=1), draw(4))),
    "attention": (lambda *qkv: ops.attention(*qkv), QUERIES),
    "attention in windows": (lambda *qkv: ops.attention(*qkv, window=2, soft_cap=2.0)[0], QUERIES),
    "attention in documents": (
        lambda *qkv: ops.attention(*qkv[:3], q_documents=DOCUMENTS, k_documents=DOCUMENTS, sinks=qkv[3])[0],
        (*QUERIES, draw(4)),
    ),
    "attention to all": (lambda *qkv: ops.attention(*qkv, causal=False, scale=0.3)[0], QUERIES),
    "causal_conv1d": (lambda x, w: ops.causal_conv1d(x, w), (draw(1, 4, 3), draw(3, 2))),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS)[0], (draw(2, 3, 6),)),
    "cross_entropy, smooth": (
        lambda x: ops.cross_entropy(x, LABELS, vocab_size=6, label_smoothing=0.1, z_loss=0.1)[0],
        (draw(2, 3, 7),),
    ),
    "embedding": (lambda t: ops.embedding(LABELS.clamp(min=0), t).sin(), (draw(6, 4),)),
    "geglu": (lambda gate, up: ops.geglu(gate, up, "tanh"), (draw(2, 3), draw(2, 3, seed=1))),
    "grouped_matmul": (lambda x, w: ops.grouped_matmul(x, w, torch.tensor([2, 5])), (draw(5, 3), draw(2, 3, 4))),
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b), (draw(2, 3, 4), draw(4), draw(4, seed=1))),
    "linear_cross_entropy": (lambda x, h: ops.linear_cross_entropy(x, h, LABELS, chunk=2)[0], (draw(2, 3, 5), draw(5, 6))),
    "mlp_tiled": (
        lambda x, *weights: ops.mlp_tiled(x, *weights, activation="silu", chunk=2),
        (draw(1, 4, 3), draw(3, 5), draw(3, 5, seed=1), draw(5, 3)),
    ),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w), (draw(2, 3, 4), draw(4))),
    "swiglu": (lambda gate, up: ops.swiglu(gate, up), (draw(2, 3), draw(2, 3, seed=1))),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_finite_differences(name):
    """Of gradients, by all operands and cotangents."""
    fn, operands = CASES[name]
    assert gradgradcheck(fn, operands)


def block(x_BSD, qkv_3DNH, o_NHD, head_DV, labels):
    normed = ops.rms_norm(x_BSD)
    q, k, v = (ops.einsum("bsd,dnh->bsnh", normed, w) for w in qkv_3DNH.unbind())
    x_BSD = x_BSD + ops.einsum("bsnh,nhd->bsd", ops.attention(q, k, v)[0], o_NHD)
    return ops.cross_entropy(ops.rms_norm(x_BSD) @ head_DV, labels)[0]


def test_a_hessian_vector_product_on_a_mesh():
    """Of a block of a decoder by its weights: batch, heads and vocabulary are sharded; it equals that of one device."""
    x, labels = draw(4, 6, 8).detach(), torch.arange(24).view(4, 6) % 12
    weights = draw(3, 8, 4, 2).detach(), draw(4, 2, 8).detach(), draw(8, 12).detach()
    directions = tuple(draw(*w.shape, seed=5).detach() for w in weights)

    def product(x, labels, weights, directions):
        return jvp(grad(lambda *weights: block(x, *weights, labels), argnums=(0, 1, 2)), weights, directions)[1]

    specs = P(None, None, "tp"), P("tp"), P(None, "tp")
    compiled = jit(product, mesh=Mesh(dp=2, tp=2), in_specs=(P("dp"), P("dp"), specs, specs))
    actual = compiled.lower(x, labels, weights, directions).simulate(x, labels, weights, directions)
    for ours, theirs in zip(actual, product(x, labels, weights, directions), strict=True):
        testing.assert_close(ours, theirs)
