"""Functions of autograd without `setup_context`: compiled gradients are those that plain autograd gives."""

import pytest
import torch
from torch.func import grad, jacrev

from mpar import Mesh, P, jit, testing

MESH = Mesh(a=2, b=2)


class Normed(torch.autograd.Function):
    """x and g to (x / norm, norm), the second without a gradient: it saves an operand, a result, an intermediate and a number."""

    @staticmethod
    def forward(ctx, x, g, eps):
        norm = (x.square().sum(-1, keepdim=True) + eps).sqrt()
        y = x / norm
        ctx.save_for_backward(g, y)
        ctx.norm, ctx.eps = norm, eps
        out = norm.clone()
        ctx.mark_non_differentiable(out)
        return y * g, out

    @staticmethod
    def backward(ctx, dy, _):
        g, y = ctx.saved_tensors
        assert ctx.eps == 0.5
        scaled = dy * g
        dx = (scaled - y * (scaled * y).sum(-1, keepdim=True)) / ctx.norm
        return dx, (dy * y).sum(0), None


class Twice(torch.autograd.Function):
    """2 x."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        assert ctx.needs_input_grad[0]
        return dy * 2


def loss(x, g):
    y, norm = Normed.apply(x, g, 0.5)
    return (Twice.apply(y).sin() * norm.detach()).sum()


@pytest.mark.parametrize("specs", [(P("a"), P("b")), (P("a", "b"), P())], ids=str)
def test_gradients_equal_those_of_plain_autograd(specs):
    """Of both operands, on two layouts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    g = torch.randn(8, generator=generator, dtype=torch.float64)
    actual = jit(lambda x, g: grad(loss, argnums=(0, 1))(x, g), mesh=MESH, in_specs=specs).lower(x, g).simulate(x, g)
    leaves = [t.clone().requires_grad_() for t in (x, g)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for name, ours, theirs in zip("xg", actual, expected, strict=True):
        testing.assert_close(ours, theirs, name=name)


def test_mapped():
    """A Jacobian, which maps the backward."""
    x = torch.arange(4.0, dtype=torch.float64)
    actual = jit(lambda x: jacrev(lambda x: Twice.apply(x).sin())(x), mesh=MESH).lower(x).simulate(x)
    testing.assert_close(actual, torch.diag(2 * (2 * x).cos()))


def test_outside_of_a_compiled_function_it_is_called_as_ever():
    """The class is not changed."""
    before = torch.autograd.Function.__dict__["apply"]
    jit(lambda x: grad(lambda x: Twice.apply(x).sum())(x), mesh=MESH).lower(torch.ones(4))
    assert torch.autograd.Function.__dict__["apply"] is before
