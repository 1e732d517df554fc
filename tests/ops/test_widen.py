"""Casts that keep pending sums pending."""

import pytest
import torch

from mpar import Mesh, P, jit, ops
from mpar.errors import DtypeError


def test_the_sum_is_carried_out_in_the_wide_dtype():
    """On two ranks a bf16 product that is pending is widened first, then reduced: the collective moves float32."""
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    step = jit(
        lambda x, w: ops.widen(ops.einsum("ab,bc->ac", x, w), torch.float32), mesh=Mesh(tp=2), in_specs=(P(None, "tp"), P("tp"))
    )
    lowered = step.lower(x, w)
    assert [(c.op, c.bytes) for c in lowered.collectives()] == [("all_reduce", 4 * 4 * 4)]
    left, right = x[:, :4] @ w[:4], x[:, 4:] @ w[4:]
    assert torch.equal(lowered.simulate(x, w), left.float() + right.float())


def test_gradient_is_a_cast_back():
    """The derivative has the dtype of the operand."""
    x = torch.randn(3).bfloat16()
    grad = torch.func.grad(lambda x: ops.widen(x, torch.float32).square().sum())(x)
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, (2 * x.float()).bfloat16())


def test_narrowing_is_refused():
    """A cast that loses bits is not a widening."""
    with pytest.raises(DtypeError, match="does not hold exactly"):
        ops.widen(torch.ones(2), torch.bfloat16)
