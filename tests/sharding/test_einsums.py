"""torch's einsum of three operands: pairs of them are multiplied, and each is sharded as an einsum of two is."""

import pytest
import torch

from mpar import Mesh, P, jit, testing, value_and_grad
from mpar.sharding import collectives_of

MESH = Mesh(a=2, b=2)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


CASES = {
    "bilinear": ("bsi, ijr, bsj -> bsr", [(2, 4, 4), (4, 4, 3), (2, 4, 4)], (P("a", None, "b"), P("b"), P("a"))),
    "chain": ("ab,bc,cd->ad", [(4, 8), (8, 2), (2, 4)], (P("a"), P(), P(None, "b"))),
    "four": ("ab,bc,cd,d->a", [(4, 8), (8, 2), (2, 4), (4,)], (P("a"), P(None, "b"), P("b"), P())),
    "a letter that is summed alone": ("ab,bc,ad->c", [(4, 8), (8, 2), (4, 6)], (P("a", "b"), P("b"), P("a"))),
    "a diagonal": ("aab,bc,cd->ad", [(4, 4, 8), (8, 2), (2, 4)], (P(), P(None, "b"), P())),
    "a broadcast": ("ab,bc,cd->ad", [(4, 1), (8, 2), (2, 4)], (P("a"), P(), P(None, "b"))),
    "no result": ("ab,bc,cd", [(4, 8), (8, 2), (2, 4)], (P("a"), P(), P(None, "b"))),
    "dots": ("...b,bc,cd->...d", [(4, 8), (8, 2), (2, 4)], (P("a"), P(), P(None, "b"))),
}


@pytest.mark.parametrize("name", CASES)
def test_einsum_is_exact(name):
    """Value and gradients are those of torch, also for equations that stay with torch."""
    equation, shapes, specs = CASES[name]
    args = [numbers(*shape) for shape in shapes]
    fn = lambda *args: torch.einsum(equation, *args)  # noqa: E731
    loss = lambda primals: fn(*primals).sin().sum()  # noqa: E731
    lowered = jit(lambda *args: (fn(*args), value_and_grad(loss)(args)), mesh=MESH, in_specs=specs).lower(*args)
    value, (_, gradients) = lowered.simulate(*args)
    testing.assert_close(value, fn(*args), name=name)
    leaves = [x.clone().requires_grad_() for x in args]
    for actual, gradient in zip(gradients, torch.autograd.grad(fn(*leaves).sin().sum(), leaves), strict=True):
        testing.assert_close(actual, gradient, name=name)


def test_three_operands_gather_nothing():
    """A sum over a sharded letter is one all_reduce of the result."""
    equation, shapes, specs = CASES["bilinear"]
    args = [numbers(*shape) for shape in shapes]
    lowered = jit(lambda *args: torch.einsum(equation, *args), mesh=MESH, in_specs=specs).lower(*args)
    assert [(found.op, found.axes, found.bytes) for found in collectives_of(lowered.ranked)] == [("all_reduce", ("b",), 96)]
