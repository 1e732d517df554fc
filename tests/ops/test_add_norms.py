"""Norms of sums: the same bits as the two ops that they stand for, forward and backward; what is refused."""

import pytest
import torch

from mpar import ops
from mpar.errors import DtypeError, ShapeError
from mpar.ops._add_layer_norm import add_layer_norm_bwd_p
from mpar.ops._add_rms_norm import add_rms_norm_bwd_p

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FUSED = {"rms": ops.add_rms_norm, "layer": ops.add_layer_norm}


def separate(kind, x, residual, *weights):
    """The two ops one after the other."""
    total = x + residual
    return (ops.rms_norm if kind == "rms" else ops.layer_norm)(total, *weights), total


def leaves(kind, make, dtype, weights_dtype=None, shape=(2, 3, 40)):
    """x, residual and the weights, which need gradients."""
    shapes = [shape, shape, *[shape[-1:]] * (1 if kind == "rms" else 2)]
    dtypes = [dtype, dtype, *[weights_dtype or dtype] * 2]
    return [make(s, d, requires_grad=True) for s, d in zip(shapes, dtypes, strict=False)]


@pytest.mark.parametrize("weights_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FUSED)
def test_bits_of_the_two_ops(kind, dtype, weights_dtype, make_tensor):
    """Results and all gradients are equal bit by bit, with a later use of the sum."""
    operands = leaves(kind, make_tensor, dtype, weights_dtype)
    cotangents = [make_tensor((2, 3, 40), dtype) for _ in range(2)]
    outputs = [fn(*operands) for fn in (FUSED[kind], lambda *args: separate(kind, *args))]
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(pair, operands, cotangents) for pair in outputs]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kind", FUSED)
def test_one_result_is_enough(kind, used, make_tensor):
    """Where only the norm, or only the sum, is used, the gradients are those of the two ops; a weight not reached gets none."""
    operands = leaves(kind, make_tensor, torch.float32)
    dy = make_tensor((2, 3, 40))
    gradients = [
        torch.autograd.grad(fn(*operands)[used], operands, dy, allow_unused=True)
        for fn in (FUSED[kind], lambda *args: separate(kind, *args))
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", FUSED)
def test_weights_are_optional(kind, make_tensor):
    """Without weights too; strided operands give contiguous results."""
    x, residual = make_tensor((3, 8)).T, make_tensor((3, 8)).T
    for ours, theirs in zip(FUSED[kind](x, residual), separate(kind, x, residual), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()


def test_backward_on_its_own(make_tensor):
    """The backward primitives can be called alone: one gradient for both operands of the sum, plus that of the sum."""
    total, dy, dtotal, weight = *(make_tensor((5, 8), torch.bfloat16) for _ in range(3)), make_tensor((8,), torch.bfloat16)
    for bwd, bare, weights in (
        (add_rms_norm_bwd_p, torch.ops.mpar.rms_norm_bwd, (weight,)),
        (add_layer_norm_bwd_p, torch.ops.mpar.layer_norm_bwd, (weight, weight)),
    ):
        dx, *dweights = bare(total, *weights, dy, eps=1e-5)
        ours, *ours_weights = bwd.bind(total, *weights, dy, dtotal, eps=1e-5)
        assert torch.equal(ours, dx + dtotal)
        assert all(torch.equal(a, b) for a, b in zip(ours_weights, dweights, strict=True))
        assert torch.equal(bwd.bind(total, *weights, dy, None, eps=1e-5)[0], dx)


@pytest.mark.parametrize("kind", FUSED)
def test_vmap(kind, make_tensor):
    """A batch of sums is normalised like each of them."""
    x, residual = make_tensor((4, 3, 8)), make_tensor((3, 4, 8))
    y, total = torch.func.vmap(FUSED[kind], in_dims=(0, 1))(x, residual)
    rows = [FUSED[kind](x[i], residual[:, i]) for i in range(4)]
    assert torch.equal(y, torch.stack([r[0] for r in rows])) and torch.equal(total, torch.stack([r[1] for r in rows]))


@pytest.mark.parametrize("kind", FUSED)
def test_wrong_operands_are_refused(kind, make_tensor):
    """Shapes, dtypes and weights that do not fit are named."""
    x = make_tensor((2, 3))
    with pytest.raises(ShapeError, match="residual \\(3,\\)"):
        FUSED[kind](x, make_tensor((3,)))
    with pytest.raises(DtypeError, match="residual torch\\.bfloat16"):
        FUSED[kind](x, x.bfloat16())
    with pytest.raises(ShapeError, match="fit x \\(2, 3\\)"):
        FUSED[kind](x, x, make_tensor((4,)))
    with pytest.raises(ShapeError, match=r"dtotal.*do not fit total"):
        add_rms_norm_bwd_p.bind(x, None, x, make_tensor((3,)), eps=1e-5)
