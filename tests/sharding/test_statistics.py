"""Covariances, correlations and diagonals of sharded tensors are torch's, and so are their gradients."""

import pytest
import torch

from mpar import Mesh, P, jit, testing

COUNTS_O = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1])
FUNCTIONS = {
    "cov": torch.cov,
    "cov of one variable": lambda x: torch.cov(x[0], correction=0),
    "cov of counted": lambda x: x.cov(fweights=COUNTS_O),
    "cov of one row": lambda x: torch.cov(x[:1]),
    "corrcoef": torch.corrcoef,
    "corrcoef of one variable": lambda x: x[1].corrcoef(),
    "diagonal": lambda x: (x * 2).fill_diagonal_(3.0),
    "diagonal that wraps": lambda x: (x[:, :3] * 2).fill_diagonal_(3.0, wrap=True),
    "diagonal of three dims": lambda x: x[:, :4].reshape(8, 2, 2)[:2].contiguous().fill_diagonal_(1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_torch_computes_them(name, make_tensor):
    """Rows and columns sharded, with the gradient of a function of the results."""
    fn, x = FUNCTIONS[name], make_tensor((8, 8), torch.float64)

    def with_gradient(x):
        return fn(x), torch.func.grad(lambda x: fn(x).sin().sum())(x)

    actual = jit(with_gradient, mesh=Mesh(a=2, b=2), in_specs=P("a", "b")).lower(x).simulate(x)
    y = x.clone().requires_grad_()
    testing.assert_close(actual[0], fn(x), name=name)
    testing.assert_close(actual[1], torch.autograd.grad(fn(y).sin().sum(), y)[0], name=f"gradient of {name}")
