"""GEGLU's kernels against float64, and halves of packed projections as operands of either gate."""

import math

import pytest
import torch

from mpar import testing
from mpar.kernels import _gates, implementation

GEGLU, GEGLU_BWD = implementation("geglu", "triton"), implementation("geglu_bwd", "triton")
SWIGLU, SWIGLU_BWD = implementation("swiglu", "triton"), implementation("swiglu_bwd", "triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def by_erf(gate, up):
    """The gate times the probability that a normal number is below it."""
    return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up


def by_tanh(gate, up):
    """Hendrycks & Gimpel's approximation."""
    return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up


def by_silu(gate, up):
    """Shazeer's product."""
    return gate / (1 + torch.exp(-gate)) * up


GATES = {
    "none": (by_erf, lambda *x: GEGLU(*x, approximate="none"), lambda *x: GEGLU_BWD(*x, approximate="none")),
    "tanh": (by_tanh, lambda *x: GEGLU(*x, approximate="tanh"), lambda *x: GEGLU_BWD(*x, approximate="tanh")),
    "silu": (by_silu, SWIGLU, SWIGLU_BWD),
}


def check(name, gate, up, dy):
    """The product and both gradients are those of float64, contiguous, in the dtype of the gate."""
    formula, forward, backward = GATES[name]
    expected, pull_back = testing.vjp(formula, gate.double(), up.double())
    results = (forward(gate, up), *backward(gate, up, dy))
    for actual, value, what in zip(results, (expected, *pull_back(dy.double())), ("y", "dgate", "dup"), strict=True):
        assert actual.dtype == gate.dtype and actual.is_contiguous()
        testing.assert_close(actual, value, name=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (1,), (), (5, 1025), (0, 8)], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_matches_float64(approximate, shape, dtype, make_tensor):
    """Both forms and their gradients, whatever the tail."""
    check(approximate, *(make_tensor(shape, dtype) for _ in range(3)))


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("width", [24, 1500])
def test_halves_of_a_packed_projection(width, name, make_tensor, monkeypatch):
    """Gate and up are the halves of every row: read where they are, not copied, forward and backward."""
    packed, dy = make_tensor((2, 3, 2 * width)), make_tensor((2, 3, width))
    gate, up = packed[..., :width], packed[..., width:]
    seen = []
    launch = _gates.launch
    monkeypatch.setattr(
        _gates, "launch", lambda kernel, grid, *args, **rest: (seen.append(args), launch(kernel, grid, *args, **rest))
    )
    check(name, gate, up, dy)
    assert all(args[i].data_ptr() == x.data_ptr() for args in seen for i, x in enumerate((gate, up)))


@pytest.mark.parametrize("name", GATES)
def test_strided_operands(name, make_tensor):
    """Transposed operands and a cotangent that one number, or one row, stands for."""
    gate, up = make_tensor((20, 6)).T, make_tensor((6, 3, 20))[:, 1]
    for dy in (torch.ones((), device=up.device).expand(6, 20), make_tensor((20,)).expand(6, 20)):
        check(name, gate, up, dy)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_large_numbers(approximate, device):
    """gelu of +-1e4 is 1e4 and 0, and so are its slopes 1 and 0."""
    gate, ones = torch.tensor([1e4, -1e4], device=device), torch.ones(2, device=device)
    assert GEGLU(gate, ones, approximate=approximate).tolist() == [1e4, 0.0]
    assert GEGLU_BWD(gate, ones, ones, approximate=approximate)[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", GATES)
def test_rows_beyond_2_to_the_31_elements(name, make_tensor, device):
    """The third row, where rows are 2**30 elements apart: strides fit int32, offsets do not."""
    base = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)
    gate, other = base.as_strided((3, 16), (2**30, 1)), make_tensor((3, 16), torch.bfloat16)
    gate.copy_(make_tensor((3, 16)))
    check(name, gate, other, other)
