"""Kernels that merge partial attention against float64, and a ring of two steps against attention over all keys."""

import math

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import _attention_support, implementation

FORWARD, BACKWARD = implementation("merge_attention", "triton"), implementation("merge_attention_bwd", "triton")
ATTENTION, ATTENTION_BWD = implementation("attention", "triton"), implementation("attention_bwd", "triton")


def reference(out_a, lse_a, out_b, lse_b):
    """The average weighted by both sums of exponentials."""
    weight_a, weight_b = lse_a.exp(), lse_b.exp()
    total = (weight_a + weight_b).unsqueeze(-1)
    return (weight_a.unsqueeze(-1) * out_a + weight_b.unsqueeze(-1) * out_b) / total, (weight_a + weight_b).log()


def _parts(make_tensor, shape=(2, 5, 3, 64), dtype=torch.float32):
    return [make_tensor(*look) for look in ((shape, dtype), (shape[:3], torch.float32)) * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_matches_float64(size, dtype, make_tensor):
    """Output, lse and all four gradients agree with float64 arithmetic; rows are no multiple of a tile."""
    parts = _parts(make_tensor, (2, 5, 3, size), dtype)
    results = FORWARD(*parts)
    expected, pull_back = testing.vjp(reference, *(x.double() for x in parts))
    cotangents = [make_tensor(x.shape, x.dtype) for x in results]
    for name, a, e in zip(("out", "lse"), results, expected, strict=True):
        testing.assert_close(a, e, name=name)
    gradients = pull_back(tuple(x.double() for x in cotangents))
    for name, a, e in zip(("out_a", "lse_a", "out_b", "lse_b"), BACKWARD(*parts, *cotangents), gradients, strict=True):
        testing.assert_close(a, e, name=f"d{name}")


def test_without_one_of_the_cotangents(make_tensor):
    """A cotangent that the caller does not have counts as zero."""
    parts = _parts(make_tensor)
    dout, dlse = make_tensor((2, 5, 3, 64)), make_tensor((2, 5, 3))
    for a, b in zip(BACKWARD(*parts, dout, None), BACKWARD(*parts, dout, torch.zeros_like(dlse)), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(BACKWARD(*parts, None, dlse), BACKWARD(*parts, torch.zeros_like(dout), dlse), strict=True):
        assert torch.equal(a, b)


def test_rows_that_see_nothing(make_tensor):
    """A blind part leaves the other as it is; two blind parts stay blind; their gradients are 0, even if that of lse is NaN."""
    out_a, lse_a, out_b, lse_b = _parts(make_tensor)
    lse_a[0], lse_b[:, 0] = -math.inf, -math.inf
    out_a[0], out_b[:, 0] = 0.0, 0.0
    out, lse = FORWARD(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0, 1:], out_b[0, 1:]) and torch.equal(out[1, 0], out_a[1, 0])
    assert (lse[0, 0] == -math.inf).all() and not out[0, 0].any()
    dlse = torch.where(lse == -math.inf, math.nan, 1.0)
    grads = BACKWARD(out_a, lse_a, out_b, lse_b, torch.ones_like(out), dlse)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0].any() and not grads[1][0].any() and not grads[3][:, 0].any()


def test_a_sum_may_be_wider_than_its_parts(make_tensor):
    """A ring keeps its sum in float32 while the parts that come in are bfloat16, perhaps not contiguous; sums do not overflow."""
    out_a, lse_a, _, lse_b = _parts(make_tensor)
    out_b = make_tensor((2, 3, 5, 64), torch.bfloat16).transpose(1, 2)
    out, lse = FORWARD(out_a, lse_a + 1000, out_b, lse_b + 1000)
    expected, expected_lse = reference(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert out.dtype == torch.float32
    testing.assert_close(out, expected, name="out", rtol=1e-4)  # lse near 1000 has 4 digits after the point
    testing.assert_close(lse, expected_lse + 1000, name="lse")
    gradients = BACKWARD(out_a, lse_a, out_b, lse_b, torch.ones_like(out), None)
    assert [x.dtype for x in gradients] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]


def test_a_ring_of_two_steps_is_attention_over_all_keys(make_tensor, device, monkeypatch):
    """Attention over each half of the keys, merged, and the gradients pulled back through both, are those of the whole."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # attention takes no float32 but in the interpreter, here
    monkeypatch.setattr(_attention_support, "DTYPES", (dtype,))
    q, k, v = (make_tensor((1, 80, heads, 64), dtype) for heads in (2, 1, 1))
    order = torch.arange(80, device=device)
    params = {"causal": True, "window": None, "scale": 0.125, "soft_cap": None}
    halves = [slice(0, 40), slice(40, 80)]
    calls = [(q, k[:, half], v[:, half], order, order[half], None, None, None) for half in halves]
    parts = [ATTENTION(*call, **params) for call in calls]
    out, lse = FORWARD(*parts[0], *parts[1])
    whole = (q, k, v, None, None, None, None, None)
    expected_out, expected_lse = ATTENTION(*whole, **params)
    testing.assert_close(out, expected_out.double(), name="out")
    testing.assert_close(lse, expected_lse.double(), name="lse")
    dout, dlse = make_tensor(out.shape, dtype), make_tensor(lse.shape)
    cotangents = BACKWARD(*parts[0], *parts[1], dout, dlse)
    grads = [ATTENTION_BWD(*calls[i], *parts[i], *cotangents[2 * i : 2 * i + 2], **params) for i in range(2)]
    dq, dk, dv, _ = ATTENTION_BWD(*whole, expected_out, expected_lse, dout, dlse, **params)
    testing.assert_close(grads[0][0] + grads[1][0], dq.double(), name="dq")
    testing.assert_close(torch.cat([grads[0][1], grads[1][1]], 1), dk.double(), name="dk")
    testing.assert_close(torch.cat([grads[0][2], grads[1][2]], 1), dv.double(), name="dv")


def test_no_rows(make_tensor):
    """Nothing to merge gives nothing."""
    parts = _parts(make_tensor, (0, 5, 3, 64))
    assert FORWARD(*parts)[0].shape == (0, 5, 3, 64)
    assert [x.shape[0] for x in BACKWARD(*parts, None, None)] == [0] * 4


def test_what_kernels_do_not_support_is_said(make_tensor):
    """Head sizes and dtypes without a kernel are refused in words."""
    with pytest.raises(KernelError, match="head size 48: kernels have 64, 128, 256"):
        FORWARD(*_parts(make_tensor, (2, 5, 3, 48)))
    with pytest.raises(KernelError, match=r"take no torch.float64"):
        FORWARD(*_parts(make_tensor, dtype=torch.float64))
