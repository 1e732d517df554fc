"""SwiGLU and GEGLU: extreme gates and what is refused; their values are in test_transforms."""

import pytest
import torch

from mpar import ops
from mpar.errors import ConfigError, DtypeError, ShapeError


@pytest.mark.parametrize("gate", [ops.swiglu, ops.geglu])
def test_extreme_gates(gate):
    """Far from zero the gate is 0 or 1, with finite gradients."""
    x, up = torch.tensor([-1e4, -90.0, 90.0, 1e4], requires_grad=True), torch.full((4,), 2.0)
    y = gate(x, up)
    assert torch.allclose(y, torch.tensor([0.0, 0.0, 180.0, 2e4]), atol=1e-30)
    assert torch.allclose(torch.autograd.grad(y.sum(), x)[0], torch.tensor([0.0, 0.0, 2.0, 2.0]), atol=1e-30)


@pytest.mark.parametrize("gate", [ops.swiglu, ops.geglu])
def test_wrong_operands_are_refused(gate, make_tensor):
    """Nothing broadcasts and nothing is promoted."""
    x = make_tensor((2, 3))
    with pytest.raises(ShapeError, match="up is \\(3,\\)"):
        gate(x, x[0])
    with pytest.raises(DtypeError, match="up is torch\\.float64"):
        gate(x, x.double())
    with pytest.raises(DtypeError, match="floating"):
        gate(x.long(), x.long())


def test_unknown_approximation_is_refused(make_tensor):
    """Only the two forms of gelu that exist."""
    with pytest.raises(ConfigError, match="'sigmoid'"):
        ops.geglu(make_tensor((2,)), make_tensor((2,)), "sigmoid")
