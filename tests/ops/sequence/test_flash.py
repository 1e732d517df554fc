"""Flash attention in C++: forward and backward against the plain formulas in float64, and what it leaves to torch."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mpar.ops.sequence import _flash
from mpar.ops.sequence._flash import flash, flash_backward
from mpar.testing import assert_close
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels
SCALE = 0.3


@pytest.fixture(autouse=True, scope="module")
def torch_is_not_asked():
    """The kernel carries out every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flash, "flash_attention_cpu", None)
        patch.setattr(_flash, "flash_attention_cpu_backward", None)
        yield


def formula(q, k, v, causal, bias):
    """`(out, lse)`, with all scores in memory; queries that see nothing have 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * SCALE
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    sees = (scores.detach() > -torch.inf).any(-1, keepdim=True)
    shares = torch.where(sees, scores, 0.0).softmax(-1) * sees  # a softmax of -inf alone has no gradient
    return shares @ v, scores.logsumexp(-1)


def operands(batch, heads, groups, queries, keys, size, draw):
    """q, k, v and dout, each stored as models have it: (B, S, N, H), and q a part of a wider tensor."""

    def make(length, count):
        return torch.randn(batch, length, count, size, generator=draw)

    q = make(queries, heads * groups + 1)[:, :, 1:].transpose(1, 2)
    k, v, dout = make(keys, heads), make(keys, heads), make(queries, heads * groups)
    return q, k.transpose(1, 2), v.transpose(1, 2), dout.transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(1, 200),
    keys=st.integers(1, 200),
    size=st.sampled_from([16, 32, 48, 128]),
    mask=st.sampled_from(["none", "causal", "one for all", "one for each"]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formulas(batch, heads, groups, queries, keys, size, mask, seed):
    """Any sizes, masks that hide all keys from some queries, heads that share keys: results and gradients."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v, dout = operands(batch, heads, groups, queries, keys, size, draw)
    causal, bias = mask == "causal", None
    if mask.startswith("one"):
        hidden = torch.rand(batch if mask == "one for each" else 1, 1, queries, keys, generator=draw) < 0.7
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    out, lse = flash(q, k, v, causal, bias, SCALE)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = formula(*wide, causal, None if bias is None else bias.double())
    assert_close(out, expected.float())
    assert_close(lse, expected_lse.float())
    grads = torch.autograd.grad(expected, wide, dout.double())
    found = flash_backward(dout, q, k, v, out, lse.masked_fill(lse == -torch.inf, torch.inf), causal, bias, SCALE)
    for name, grad, meant in zip(("dq", "dk", "dv"), found, grads, strict=True):
        torch.testing.assert_close(grad, meant.float(), rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
@pytest.mark.parametrize("size", [32, 80])
def test_bfloat16_is_float32_rounded_once(mask, size, monkeypatch):
    """Results and gradients are those of widened operands, bit by bit; also where torch's kernel would be asked."""
    monkeypatch.setattr(_flash, "_kernel", lambda dtype: str(dtype).removeprefix("torch."))
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (x.bfloat16() for x in operands(2, 2, 2, 130, 130, size, draw))
    bias = torch.randn(2, 1, 130, 130, generator=draw).bfloat16() if mask == "bias" else None
    how = (mask == "causal", bias, SCALE)
    wide = (mask == "causal", None if bias is None else bias.float(), SCALE)
    out, lse = flash(q, k, v, *how)
    expected, expected_lse = flash(q.float(), k.float(), v.float(), *wide)
    assert torch.equal(out, expected.bfloat16()) and torch.equal(lse, expected_lse)
    found = flash_backward(dout, q, k, v, out, lse, *how)
    grads = flash_backward(dout.float(), q.float(), k.float(), v.float(), out.float(), lse, *wide)
    assert all(a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16()) for a, b in zip(found, grads, strict=True))


def test_bfloat16_is_left_to_torch_where_it_computes_in_it(monkeypatch):
    """Only other CPUs have the kernel."""
    for has in (True, False):
        monkeypatch.setattr(_flash, "onednn_has_bfloat16", lambda has=has: has)
        _flash._kernel.cache_clear()
        assert _flash._kernel(torch.bfloat16) == (None if has else "bfloat16") and _flash._kernel(torch.float32) == "float32"
    monkeypatch.undo()
    _flash._kernel.cache_clear()


def test_threads_change_no_bit():
    """Results are those of one thread, bit by bit, however many there are."""
    given = operands(1, 2, 2, 150, 150, 32, torch.Generator().manual_seed(0))
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out, lse = flash(*given[:3], True, None, SCALE)
        found.append([out, lse, *flash_backward(given[3], *given[:3], out, lse, True, None, SCALE)])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_the_default_dtype_counts_for_nothing():
    """Log-sum-exps are float32, whatever tensors are by default."""
    given = operands(1, 1, 1, 9, 9, 16, torch.Generator().manual_seed(0))[:3]
    expected = flash(*given, True, None, SCALE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = flash(*given, True, None, SCALE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_numbers_that_are_none():
    """A query that is no number has results that are none, and so have gradients of keys; others are as without it."""
    q, k, v, dout = operands(1, 1, 1, 70, 70, 16, torch.Generator().manual_seed(1))
    expected, _ = flash(q, k, v, True, None, SCALE)
    q = q.clone()
    q[0, 0, 3] = torch.nan
    out, lse = flash(q, k, v, True, None, SCALE)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    assert torch.equal(out[0, 0, 4:], expected[0, 0, 4:]) and torch.equal(out[0, 0, :3], expected[0, 0, :3])
    assert flash_backward(dout, q, k, v, out, lse, True, None, SCALE)[1][0, 0, :4].isnan().all()


@pytest.mark.parametrize("case", ["float64", "bfloat16", "a size that is no vector"])
def test_what_it_leaves_to_torch(case, monkeypatch):
    """The results are those of torch's kernel."""
    size = 20 if "size" in case else 32
    q, k, v, _ = operands(1, 2, 1, 9, 9, size, torch.Generator().manual_seed(2))
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    monkeypatch.setattr(_flash, "flash_attention_cpu", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    out, _ = flash(q.to(dtype), k.to(dtype), v.to(dtype), True, None, SCALE)
    assert_close(out, formula(q.double(), k.double(), v.double(), True, None)[0].to(dtype))
