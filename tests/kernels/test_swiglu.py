"""SwiGLU's kernels against float64."""

import pytest
import torch

from mpar import testing
from mpar.kernels import implementation

FORWARD, BACKWARD = implementation("swiglu", "triton"), implementation("swiglu_bwd", "triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference(gate, up):
    """Shazeer's product in plain torch."""
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (1,), (5, 1025), (0, 8)], ids=str)
def test_matches_float64(shape, dtype, make_tensor):
    """The product and its gradients agree with float64 arithmetic, whatever the tail."""
    gate, up, dy = (make_tensor(shape, dtype) for _ in range(3))
    expected, pull_back = testing.vjp(reference, gate.double(), up.double())
    testing.assert_close(FORWARD(gate, up), expected, name="y")
    for actual, gradient, name in zip(BACKWARD(gate, up, dy), pull_back(dy.double()), ("dgate", "dup"), strict=True):
        testing.assert_close(actual, gradient, name=name)


def test_reads_strided_operands(make_tensor):
    """Halves of a packed projection are two operands."""
    packed = make_tensor((4, 2, 24), torch.float32)
    gate, up = packed[:, 0], packed[:, 1]
    testing.assert_close(FORWARD(gate, up), reference(gate.double(), up.double()))


def test_large_numbers_do_not_overflow():
    """silu of +-1e4 is 1e4 and 0, and so are its slopes 1 and 0."""
    gate, ones = torch.tensor([1e4, -1e4]), torch.ones(2)
    assert FORWARD(gate, ones).tolist() == [1e4, 0.0]
    assert BACKWARD(gate, ones, ones)[0].tolist() == [1.0, 0.0]
