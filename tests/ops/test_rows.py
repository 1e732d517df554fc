"""The C++ kernels of rows: against the primitives' meaning in float64, and what is left to torch."""

import pytest
import torch

from mpar import ops
from mpar.ops import PRIMITIVES, _rows
from mpar.testing import assert_close
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels
SHAPES = [(1, 7), (3, 16), (70, 33), (300, 256)]
"""Rows and their sizes: less than a vector, whole vectors and rests, several strips, enough for several threads."""


DTYPES = [torch.float32, torch.bfloat16]


def by_torch(primitive, *operands, monkeypatch, **params):
    """The results of torch's ops in the dtype of the operands."""
    with monkeypatch.context() as patch:
        patch.setattr(_rows, "cpp_function", lambda *_: None)
        results = primitive.impl(*operands, **params)
    return results if isinstance(results, (list, tuple)) else [results]


def meaning(primitive, *operands, **params):
    """The results of torch's ops in float64."""
    results = primitive.impl(*(x if x is None else x.double() for x in operands), **params)
    return results if isinstance(results, (list, tuple)) else [results]


def compare(found, expected):
    """All results are those that are meant; those of bfloat16 are rounded up to three times."""
    found = found if isinstance(found, (list, tuple)) else [found]
    assert len(found) == len(expected)
    for x, meant in zip(found, expected, strict=True):
        if x.dtype == torch.float32:
            assert_close(x, meant.float())
        else:
            largest = meant.abs().max()
            torch.testing.assert_close(x.double(), meant, rtol=3 * 2**-8, atol=2**-8 * largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(shape, dtype, make_tensor):
    """Large numbers of both signs, results and gradients; operands may be parts of wider rows."""
    wide = make_tensor((shape[0], 2 * shape[1]), dtype) * 20
    gate, up = wide.split(shape[1], -1)
    dy = make_tensor(shape, dtype)
    swiglu = PRIMITIVES["swiglu"]
    pairs = [(gate, up), (gate.contiguous(), up), (gate, up.contiguous()), (gate.contiguous(), up.contiguous()), (gate.mT, up.mT)]
    for pair in pairs:
        found = _rows.swiglu_rows(*pair)
        compare(found, meaning(swiglu, *pair))
        assert found.is_contiguous()
    compare(_rows.swiglu_backward_rows(gate, up, dy), meaning(swiglu.bwd, gate, up, dy))
    extreme = torch.tensor([[-torch.inf, torch.inf, torch.nan, -200.0, 200.0, -0.0]], dtype=dtype)
    found = _rows.swiglu_rows(extreme, torch.ones_like(extreme))
    torch.testing.assert_close(found, torch.nn.functional.silu(extreme), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, weighted, dtype, make_tensor):
    """Results and gradients, with a weight and without."""
    x, dy = make_tensor(shape, dtype), make_tensor(shape, dtype)
    weight, norm = make_tensor(shape[1:], dtype) if weighted else None, PRIMITIVES["rms_norm"]
    compare(_rows.rms_norm_rows(x, weight, 1e-5), meaning(norm, x, weight, eps=1e-5))
    dx, dweight = _rows.rms_norm_backward_rows(x, weight, dy, 1e-5)
    expected = meaning(norm.bwd, x, weight, dy, eps=1e-5)
    compare([dx, *([dweight] if weighted else [])], expected if weighted else expected[:1])
    assert weighted or dweight is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("half", [8, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_rope(batch, half, interleaved, dtype, make_tensor):
    """Of all features or some, with tables for all rows or for each; into a new tensor, and over the operand, which may be a part
    of a wider one."""
    x = make_tensor((3, 40, 6, 32), dtype)[:, :, 1:5]
    cos, sin = make_tensor((batch, 40, half)), make_tensor((batch, 40, half))
    expected = meaning(PRIMITIVES["rope"], x, cos, sin, interleaved=interleaved)
    compare(_rows.rotated_rows(x, cos, sin, None, interleaved=interleaved), expected)
    assert _rows.rotated_rows(x, cos, sin, x, interleaved=interleaved) is x
    compare(x, expected)


def test_bfloat16_is_rounded_where_torch_rounds_it(make_tensor, monkeypatch):
    """Nearly all numbers have the bits of torch's ops, whose sums have another order."""
    shape, dtype = (300, 256), torch.bfloat16
    gate, up, dy, weight = (make_tensor(size, dtype) for size in (shape, shape, shape, shape[1:]))
    x, tables = make_tensor((2, 40, 4, 32), dtype), make_tensor((2, 1, 40, 16))
    swiglu, norm, rope = (PRIMITIVES[name] for name in ("swiglu", "rms_norm", "rope"))
    calls = [
        (swiglu, (gate, up), {}),
        (swiglu.bwd, (gate, up, dy), {}),
        (norm, (gate, weight), {"eps": 1e-5}),
        (norm, (gate, None), {"eps": 1e-5}),
        (norm.bwd, (gate, weight, dy), {"eps": 1e-5}),
        (rope, (x, *tables), {"interleaved": False}),
    ]
    for primitive, operands, params in calls:
        found, expected = primitive.impl(*operands, **params), by_torch(primitive, *operands, monkeypatch=monkeypatch, **params)
        for a, b in zip(found if isinstance(found, (list, tuple)) else [found], expected, strict=True):
            assert a.dtype == b.dtype == dtype and (a == b).float().mean() > 0.99, primitive.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(shape, make_tensor):
    """Statistics and probabilities, of parts of wider rows, into other rows and over the operand; labels that are almost certain
    and almost impossible."""
    x = (make_tensor((shape[0], shape[1] + 5)) * 30)[:, 2 : shape[1] + 2]
    labels, scale = torch.arange(shape[0]) % shape[1], make_tensor(shape[:1])
    labels[0], labels[-1] = x[0].argmax(), x[-1].argmin()
    x[0, labels[0]] += 20
    lse, target, logp = _rows.softmax_statistics_rows(x, labels)
    expected = torch.log_softmax(x.double(), 1).gather(1, labels[:, None]).squeeze(1)
    assert torch.equal(target, x.gather(1, labels[:, None]).squeeze(1))
    torch.testing.assert_close(logp.double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse.double(), torch.logsumexp(x.double(), 1), rtol=1e-6, atol=1e-6)
    y = torch.zeros(shape[0], shape[1] + 3)
    found = _rows.softmax_rows(x, lse, scale, y[:, : shape[1]])
    torch.testing.assert_close(found.double(), torch.softmax(x.double(), 1) * scale[:, None], rtol=1e-4, atol=1e-30)
    assert not y[:, shape[1] :].any()
    assert torch.equal(_rows.softmax_rows(x, lse, scale, x), found)


def test_softmax_of_numbers_that_are_none():
    """The log of the sum of exponentials is that of torch; a row with NaN, or without a possible logit, has no probabilities, an
    infinite logit has none, and impossible ones have 0."""
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, nan, 2.0], [nan] * 3, [-inf, nan, -inf], [1.0, nan, inf], [-inf] * 3, [1.0, inf, 2.0], [1.0, -inf, 200.0]]
    x = torch.tensor(rows).repeat(1, 6)
    lse, _, logp = _rows.softmax_statistics_rows(x, torch.tensor([0, 0, 0, 0, 0, 0, 1]))
    torch.testing.assert_close(lse, torch.logsumexp(x, 1), equal_nan=True)
    assert logp[:6].isnan().all() and logp[6] == -inf
    y = _rows.softmax_rows(x, lse, torch.ones(7), torch.empty(7, 18))
    assert y[:5].isnan().all() and y[5, 1::3].isnan().all()
    torch.testing.assert_close(y[6], torch.softmax(x[6], 0))


def test_threads_change_no_bit(make_tensor):
    """Gradients of weights are sums of rows, whose order does not depend on the number of threads."""
    x, weight, dy = make_tensor((300, 256)), make_tensor((256,)), make_tensor((300, 256))
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(_rows.rms_norm_backward_rows(x, weight, dy, 1e-5))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_is_left_to_torch(make_tensor):
    """Other dtypes, and tensors without elements."""
    for dtype in (torch.float64, torch.float16):
        assert _rows.swiglu_rows(make_tensor((2, 4), dtype), make_tensor((2, 4), dtype)) is None
    assert _rows.rms_norm_rows(make_tensor((2, 4), torch.bfloat16), torch.ones(4), 1e-6) is None
    assert _rows.rms_norm_rows(torch.empty(0, 4), torch.ones(4), 1e-6) is None
    gaps, table = make_tensor((1, 2, 8, 3)).mT, make_tensor((1, 2, 4))
    assert _rows.rotated_rows(gaps, table, table, None, interleaved=False) is None


@pytest.mark.parametrize("size", [1, 7, 512, 513, 20_000])
def test_the_largest_number_of_a_row_and_its_place(size):
    """The first of equal ones, in whichever block it is; the first NaN, and infinite ones; in rows that are parts of others."""
    x = torch.randn(8, size + 3, generator=torch.Generator().manual_seed(0)).round(decimals=1)[:, :size]
    x[0, [size // 2, size - 1]] = x[1, size - 1] = 9.0
    x[2] = -torch.inf
    x[3, [size // 2, size - 1]] = torch.nan
    x[4, 0], x[4, size - 1] = torch.inf, torch.nan
    x[5] = -0.0
    x[5, size // 2] = 0.0
    x[6, size // 3] = torch.inf
    for rows in (x, x[:1], x[::2], x.T.contiguous().T, x.double()):
        values, places = ops.row_max(rows)
        assert torch.equal(places, rows.argmax(-1))
        torch.testing.assert_close(values, rows.gather(1, places[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)
