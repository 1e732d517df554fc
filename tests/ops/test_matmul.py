"""The product of two matrices by mpar's C++: values, bits, what is written where, and what is left to torch."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mpar.ops import _matmul
from mpar.ops._matmul import matmul
from mpar.ops._product import add_product, product, product_into
from mpar.testing import assert_close
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels
BY_ROWS = {"rows": lambda make, m, n: make((m, n)), "parts of rows": lambda make, m, n: make((m, n + 5))[:, 2 : n + 2]}
FIRST = BY_ROWS | {"one row": lambda make, m, n: make((1, n)).expand(m, n)}
SECOND = FIRST | {
    "columns": lambda make, m, n: make((n, m)).T,
    "parts of columns": lambda make, m, n: make((n, m + 5))[:, 2 : m + 2].T,
    "every other column": lambda make, m, n: make((m, 2 * n))[:, ::2],
}


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    """Use the kernel on any CPU for which it can be compiled, for products of any size."""
    monkeypatch.setattr(_matmul, "matmul_is_faster", lambda: True)
    for name in ("_FEWEST_ROWS", "_FEWEST_COLUMNS", "_FEWEST_PRODUCTS"):
        monkeypatch.setattr(_matmul, name, 1)
    _matmul._plan.cache_clear()
    yield
    _matmul._plan.cache_clear()


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_equals_the_product(first, second, make_tensor):
    """Sizes at and around those of tiles, strips and blocks."""
    for m, k, n in itertools.product((1, 5, 6, 13, 97, 200), (1, 16, 37), (1, 8, 9, 16, 33, 48)):
        a, b = FIRST[first](make_tensor, m, k), SECOND[second](make_tensor, k, n)
        y = matmul(a, b)
        assert y.is_contiguous()
        assert_close(y, a.double() @ b.double(), rtol=1e-5, name=f"{m} x {k} x {n}")


@pytest.mark.parametrize(("rows", "inner", "columns"), [(97, 1200, 40), (40, 32, 4100), (30, 800, 2100), (70, 2048, 40)])
@pytest.mark.parametrize("second", ["rows", "columns"])
def test_large_sizes(second, rows, inner, columns, make_tensor):
    """More than fits in a strip, in what is copied at once, and rows that are pages apart."""
    a, b = make_tensor((rows, inner)), SECOND[second](make_tensor, inner, columns)
    assert_close(matmul(a, b), a.double() @ b.double(), rtol=1e-5)


@pytest.mark.parametrize("inner", [37, 900])
def test_written_and_added_to(inner, make_tensor):
    """Rows of another tensor, and nothing beside them."""
    a, b, wide = make_tensor((50, inner)), make_tensor((inner, 44)), make_tensor((70, 44))
    before, expected = wide.clone(), a.double() @ b.double()
    assert product_into(wide[10:60], a, b).data_ptr() == wide[10].data_ptr()
    assert_close(wide[10:60], expected, rtol=1e-5)
    add_product(wide[10:60], a, b)
    assert_close(wide[10:60], 2 * expected, rtol=1e-5)
    assert torch.equal(wide[:10], before[:10]) and torch.equal(wide[60:], before[60:])
    assert matmul(a, b, make_tensor((50, 43))) is None and matmul(a, b, torch.empty(50, 44, dtype=torch.float64)) is None


@pytest.mark.parametrize("second", ["rows", "columns"])
def test_bits_depend_on_nothing_beside(second, make_tensor):
    """A part of the rows and of the columns, alone; threads."""
    a, b = make_tensor((203, 500)), SECOND[second](make_tensor, 500, 81)
    y = matmul(a, b)
    for rows, columns in itertools.product((slice(0, 1), slice(7, 30), slice(100, 203)), (slice(0, 5), slice(3, 80))):
        assert torch.equal(matmul(a[rows], b[:, columns]), y[rows, columns])
    num_threads = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(matmul(a, b), y) and torch.equal(matmul(a[:9], b), y[:9])
        finally:
            torch.set_num_threads(num_threads)


def test_numbers_that_are_none(make_tensor):
    """NaN and infinity stay in their rows and columns, those of the last strip too, the missing columns of which are zeros."""
    a, b = make_tensor((20, 30)), make_tensor((30, 19))
    a[3, 4], b[2, 18] = torch.nan, torch.inf
    y = matmul(a, b)
    assert y[3].isnan().all() and y[:, 18].isinf().sum() == 19 and y.isfinite().sum() == 19 * 18


def test_parameters_and_traces(make_tensor):
    """A parameter is read like any tensor; in a trace the product is one op, which computes the same."""
    a, b = make_tensor((20, 64)), make_tensor((64, 48))
    expected = matmul(a, b)
    assert torch.equal(matmul(a, torch.nn.Parameter(b, requires_grad=False)), expected)
    traced = make_fx(product, tracing_mode="fake")(a, b)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [torch.ops.mpar_matmul.matmul.default]
    assert torch.equal(traced(a, b), expected)
    for fn in (product_into, add_product):
        traced = make_fx(fn, tracing_mode="fake")(torch.zeros(20, 48), a, b)
        assert torch.equal(traced(torch.zeros(20, 48), a, b), expected)


def test_a_fake_result(make_tensor):
    """It is not written to, but in a trace."""
    a, b = make_tensor((20, 64)), make_tensor((64, 48))
    with FakeTensorMode() as mode:
        out = mode.from_tensor(torch.empty(20, 48))
        assert matmul(mode.from_tensor(a), mode.from_tensor(b), out) is out
        assert matmul(mode.from_tensor(a), mode.from_tensor(b), out, adds=True) is out


def test_what_is_left_to_torch(monkeypatch, make_tensor):
    """Other dtypes and devices, rows with gaps, sizes that do not fit, no numbers."""
    a, b = make_tensor((20, 30)), make_tensor((30, 40))
    assert matmul(a, b) is not None and matmul(a, b, torch.empty(40, 20).T) is None
    assert matmul(a.double(), b.double()) is None and matmul(a, b.double()) is None and matmul(a, b.to("meta")) is None
    assert matmul(make_tensor((20, 60))[:, ::2], b) is None and matmul(make_tensor((30, 20)).T, b) is None
    assert matmul(a, b[:29]) is None
    assert matmul(a[:0], b) is None and matmul(a[:, :0], b[:0]) is None and matmul(a, b[:, :0]) is None
    monkeypatch.setattr(_matmul, "matmul_is_faster", lambda: False)
    assert matmul(a, b) is None
