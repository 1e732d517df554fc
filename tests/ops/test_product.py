"""Product: torch.mm of the same operands, whichever library multiplies them, however they lie in memory."""

import pytest
import torch

from mpar.ops import _product
from mpar.ops._product import product
from mpar.testing import assert_close

LAYOUTS = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).T,
    "parts of longer rows": lambda m, n: torch.randn(m, n + 3)[:, 1 : n + 1],
    "parts of longer columns": lambda m, n: torch.randn(n, m + 3)[:, 1 : m + 1].T,
    "one row": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column": lambda m, n: torch.randn(m, 1).expand(m, n),
    "one number": lambda m, n: torch.randn(1, 1).expand(m, n),
    "every other row": lambda m, n: torch.randn(2 * m, n)[::2],
}


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_those_of_torch(layout, other):
    for m, k, n in ((128, 24, 40), (63, 24, 40), (100, 1, 7), (64, 7, 1), (64, 0, 5), (64, 5, 0), (0, 5, 7)):
        a, b = LAYOUTS[layout](m, k), LAYOUTS[other](k, n)
        y = product(a, b)
        assert y.shape == (m, n) and y.is_contiguous()
        assert_close(y, a.double() @ b.double(), name=f"{m} x {k} x {n}")


def test_the_default_dtype_and_device_count_for_nothing():
    """Products are float32 in the memory of the CPU, whatever tensors are by default, of many rows and of few."""
    a, b = torch.randn(256, 64), torch.randn(64, 96)
    for given in (a, a[:3]):
        expected = product(given, b)
        for dtype, device in ((torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")):
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            try:
                found = product(given, b)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_views_with_the_other_sign():
    """What torch negates when it is read."""
    a, b = torch.randn(256, 64), torch.randn(64, 96)
    for given in (a, a[:3]):
        assert_close(product(torch._neg_view(given), b), -(given.double() @ b.double()))
        assert_close(product(given, torch._neg_view(b)), -(given.double() @ b.double()))


def test_a_row_does_not_depend_on_others():
    """The bits of a row are those that it has beside other rows."""
    a, b = torch.randn(128, 48), torch.randn(48, 96)
    other = a.clone()
    other[1:] = torch.randn(127, 48)
    assert torch.equal(product(a, b)[0], product(other, b)[0])


@pytest.mark.parametrize("widened", [2**22, 100], ids=["at once", "in parts"])
@pytest.mark.parametrize("layout", ["rows", "columns", "parts of longer rows", "one column"])
def test_bfloat16_on_a_cpu_that_does_not_compute_in_it(layout, widened, monkeypatch):
    """Sums are those of float32, rounded once."""
    monkeypatch.setattr(_product, "onednn_has_bfloat16", lambda: False)
    monkeypatch.setattr(_product, "_WIDENED", widened)
    for m, k, n in ((70, 24, 40), (9, 1, 7), (1, 7, 1), (64, 0, 5), (64, 5, 0), (0, 5, 7)):
        a, b = torch.randn(m, k).bfloat16(), LAYOUTS[layout](k, n).bfloat16()
        y = product(a, b)
        assert y.shape == (m, n) and y.is_contiguous() and y.dtype == torch.bfloat16
        assert_close(y, (a.double() @ b.double()).bfloat16(), rtol=2**-7, name=f"{m} x {k} x {n}")
