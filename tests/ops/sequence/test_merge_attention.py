"""Merges of partial attention: value, gradients, rows that see nothing, dtypes."""

import math

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DtypeError, ShapeError


def reference(out_a, lse_a, out_b, lse_b):
    """The average weighted by both sums of exponentials."""
    weight_a, weight_b = lse_a.exp(), lse_b.exp()
    total = (weight_a + weight_b).unsqueeze(-1)
    return (weight_a.unsqueeze(-1) * out_a + weight_b.unsqueeze(-1) * out_b) / total, (weight_a + weight_b).log()


def _parts(make_tensor, dtype=torch.float64):
    wide = torch.promote_types(dtype, torch.float32)
    return [make_tensor(*look, requires_grad=True) for look in (((2, 3, 4, 5), dtype), ((2, 3, 4), wide)) * 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_float64(dtype, make_tensor):
    """Output, lse and all four gradients agree with float64 arithmetic."""
    parts = _parts(make_tensor, dtype)
    results, pull_back = testing.vjp(ops.merge_attention, *parts)
    expected, expected_pull_back = testing.vjp(reference, *(x.double() for x in parts))
    cotangents = [make_tensor(x.shape, x.dtype) for x in results]
    for name, a, e in zip(("out", "lse"), results, expected, strict=True):
        testing.assert_close(a, e, name=name)
    gradients = expected_pull_back(tuple(x.double() for x in cotangents))
    for name, a, e in zip(("out_a", "lse_a", "out_b", "lse_b"), pull_back(tuple(cotangents)), gradients, strict=True):
        testing.assert_close(a, e, name=f"d{name}")


def test_rows_that_see_nothing(make_tensor):
    """A blind part leaves the other as it is; two blind parts stay blind; what is blind has gradient 0."""
    out_a, lse_a, out_b, lse_b = (x.detach() for x in _parts(make_tensor))
    lse_a[0], lse_b[:, 0] = -math.inf, -math.inf
    out_a[0], out_b[:, 0] = 0.0, 0.0
    parts = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = ops.merge_attention(*parts)
    assert torch.equal(out[0, 1:], out_b[0, 1:]) and torch.equal(out[1, 0], out_a[1, 0])
    assert (lse[0, 0] == -math.inf).all() and not out[0, 0].any()
    dlse = torch.where(lse == -math.inf, math.nan, 1.0)
    grads = torch.autograd.grad((out, lse), parts, (torch.ones_like(out), dlse))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0].any() and not grads[1][0].any() and not grads[3][:, 0].any()


def test_a_sum_may_be_wider_than_its_parts(make_tensor):
    """A ring keeps its sum in float32 while the parts that come in are bfloat16."""
    out_a, lse_a, out_b, lse_b = _parts(make_tensor, torch.float32)
    out, _ = ops.merge_attention(out_a, lse_a, out_b.bfloat16(), lse_b)
    expected, _ = reference(*(x.double() for x in (out_a, lse_a, out_b.bfloat16(), lse_b)))
    assert out.dtype == torch.float32
    testing.assert_close(out, expected, name="out")


def test_large_sums_do_not_overflow(make_tensor):
    """Sums of exponentials beyond all floats merge as their logarithms."""
    out_a, _, out_b, _ = _parts(make_tensor)
    out, lse = ops.merge_attention(out_a, torch.full((2, 3, 4), 2000.0).double(), out_b, torch.full((2, 3, 4), 2000.0).double())
    testing.assert_close(out, (out_a + out_b) / 2, name="out")
    testing.assert_close(lse, torch.full_like(lse, 2000.0 + math.log(2)), name="lse")


@pytest.mark.parametrize(
    ("at", "shape", "dtype", "error"),
    [
        (0, (2, 3, 4), torch.float64, ShapeError),
        (3, (2, 3, 5), torch.float64, ShapeError),
        (1, (2, 3, 4), torch.float32, DtypeError),
    ],
    ids=str,
)
def test_wrong_operands_are_refused(at, shape, dtype, error, make_tensor):
    """Shapes must fit, and both lse have one dtype."""
    parts = _parts(make_tensor)
    parts[at] = make_tensor(shape, dtype)
    with pytest.raises(error, match="merge_attention of"):
        ops.merge_attention(*parts)
