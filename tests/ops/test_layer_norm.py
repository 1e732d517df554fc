"""Layer norm and RMS norm: optional operands, mixed dtypes, and what is refused."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DtypeError, ShapeError


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
def test_operands_are_optional(has_weight, has_bias, make_tensor):
    """Any of weight and bias may be left out; gradients of the rest are right."""
    x = make_tensor((2, 3, 7), torch.float64, requires_grad=True)
    weight = make_tensor((7,), torch.float64, requires_grad=True) if has_weight else None
    bias = make_tensor((7,), torch.float64, requires_grad=True) if has_bias else None
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * (1 if weight is None else weight) + (0 if bias is None else bias)
    y, leaves = ops.layer_norm(x, weight, bias), [p for p in (x, weight, bias) if p is not None]
    testing.assert_close(y, expected, name="y")
    dy = make_tensor(y.shape, torch.float64)
    for a, e in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        testing.assert_close(a, e, name="gradient")


@pytest.mark.parametrize("norm", [ops.layer_norm, ops.rms_norm])
def test_float32_weights_of_bfloat16_values(norm, make_tensor):
    """A float32 gain keeps its dtype in the gradient; the result has the dtype of x."""
    x, weight = make_tensor((2, 3, 40), torch.bfloat16, requires_grad=True), make_tensor((40,), requires_grad=True)
    y = norm(x, weight)
    expected = norm(x.double(), weight.double())
    assert y.dtype == torch.bfloat16
    testing.assert_close(y, expected, name="y")
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)
    testing.assert_close(dweight, torch.autograd.grad(expected.sum(), weight)[0], name="dweight", rtol=2e-2)


@pytest.mark.parametrize("norm", [ops.layer_norm, ops.rms_norm])
def test_wrong_operands_are_refused(norm, make_tensor):
    """Integers and gains of another size."""
    with pytest.raises(DtypeError, match="needs a floating dtype"):
        norm(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="fit x \\(2, 3\\)"):
        norm(make_tensor((2, 3)), make_tensor((4,)))
