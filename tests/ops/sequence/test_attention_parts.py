"""Attention to keys in parts: it is attention to all of them, value and gradient."""

import itertools

import pytest
import torch

from mpar import ops
from mpar.errors import ShapeError
from mpar.sharding import trace
from mpar.testing import assert_close

B, N, K, H, LENGTH, PARTS = 2, 4, 2, 6, 5, 4


def operands(dtype=torch.float64):
    """Queries of the last slice; keys and values of all slices; their positions and documents, which end inside slices."""
    generator = torch.Generator().manual_seed(0)
    q, *keys = (
        torch.randn(B, LENGTH, heads, H, generator=generator, dtype=torch.float64).to(dtype) for heads in (N, *[K] * 2 * PARTS)
    )
    order = torch.arange(LENGTH * PARTS)
    documents = torch.stack([torch.arange(LENGTH * PARTS) >= 8, torch.arange(LENGTH * PARTS) >= 17]).long()
    return q, keys[:PARTS], keys[PARTS:], order, documents


def split(q, ks, vs, order, documents):
    """(own, past) of the last slice, oldest first."""
    documents = documents.split(LENGTH, 1) if documents is not None else [None] * PARTS
    *past, own = (ops.KeyPart(*part) for part in zip(ks, vs, order.split(LENGTH), documents, strict=True))
    return own, past


def whole(q, ks, vs, order, documents, sinks_N, how):
    """The same by one attention to all keys."""
    last = None if documents is None else documents[:, -LENGTH:]
    return ops.attention(
        q,
        torch.cat(list(ks), 1),
        torch.cat(list(vs), 1),
        q_order=order[-LENGTH:],
        k_order=order,
        q_documents=last,
        k_documents=documents,
        sinks=sinks_N,
        **how,
    )[0]


HOW = [{}, {"window": 3}, {"window": 12}, {"soft_cap": 0.7}, {"scale": 0.3}]


@pytest.mark.parametrize(("how", "packed", "sunk"), list(itertools.product(HOW, (False, True), (False, True))))
def test_parts_are_all_keys(how, packed, sunk):
    """Result and gradients of queries, of the keys and values of each part, and of sinks, in float64."""
    q, ks, vs, order, documents = operands()
    documents = documents if packed else None
    sinks_N = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if sunk else None
    weight = torch.randn(B, LENGTH, N, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(attend):
        def loss(q, ks, vs, sinks_N):
            out = attend(q, ks, vs, sinks_N)
            return (out * weight).sum(), out

        *grads, out = torch.func.grad(loss, argnums=(0, 1, 2, 3) if sunk else (0, 1, 2), has_aux=True)(q, ks, vs, sinks_N)
        leaves = [x for grad in grads[0] for x in (grad if isinstance(grad, list) else [grad])]
        return [out, *leaves]

    def in_parts(q, ks, vs, sinks_N):
        own, past = split(q, ks, vs, order, documents)
        return ops.attention_parts(q, own, past, sinks_N=sinks_N, **how)

    expected = run(lambda q, ks, vs, sinks_N: whole(q, ks, vs, order, documents, sinks_N, how))
    for index, (actual, wanted) in enumerate(zip(run(in_parts), expected, strict=True)):
        assert_close(actual, wanted, name=f"result {index}")


def test_sums_are_wide():
    """bfloat16 parts are added in float32: the result is as near to the truth as that of one attention."""
    q, ks, vs, order, _ = operands(torch.bfloat16)
    own, past = split(q, ks, vs, order, None)
    wide = q.double(), [k.double() for k in ks], [v.double() for v in vs]
    exact = whole(*wide, order, None, None, {})
    error = (ops.attention_parts(q, own, past).double() - exact).norm()
    assert error < 1.15 * (whole(q, ks, vs, order, None, None, {}).double() - exact).norm()


def test_the_gradient_keeps_no_partial_result():
    """Merges belong to the forward alone: the backward reads the result of all parts, and runs `attention_bwd` once a part."""
    q, ks, vs, order, _ = operands()
    own, past = split(q, ks, vs, order, None)

    def joint(q, dout):
        _, pull = torch.func.vjp(lambda q: ops.attention_parts(q, own, past), q)
        return pull(dout)

    names = [str(node.target) for node in trace(joint, (q, torch.ones_like(q))).graph.nodes]
    assert sum("merge_attention" in name for name in names) == len(past)
    assert sum("attention_bwd" in name for name in names) == PARTS and not any("merge_attention_bwd" in name for name in names)


def test_parts_must_fit():
    """A part with keys of another size is refused as attention refuses it."""
    q, ks, vs, order, _ = operands()
    own, past = split(q, ks, vs, order, None)
    with pytest.raises(ShapeError, match="to fit q"):
        ops.attention_parts(q, own, [past[0]._replace(k_BMKH=ks[0][..., :3])])
