"""Transforms of torch and functions that users write with them: what a compiled function computes is what the plain one does."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mpar import Mesh, P, jit, ops, testing, value_and_grad
from mpar.errors import DifferentiationError

MESH = Mesh(a=2, b=2)
LAYERS = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.GELU(), torch.nn.LayerNorm(8)).to("meta")


def net(row, w):
    return ops.rms_norm(torch.tanh(row @ w)).pow(2) @ w


class Cube(torch.autograd.Function):
    """x^3, whose gradient the user wrote."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x * x * dy


def forces(x, w):
    x = x.detach().requires_grad_()
    energy = torch.tanh(x @ w).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force


def module(x, w):
    return functional_call(LAYERS, {"0.weight": w, "2.weight": w[0], "2.bias": w[1]}, (x,))


FUNCTIONS = {
    "autograd.Function": lambda x, w: grad(lambda x: (Cube.apply(x) @ w).sum())(x),
    "checkpoint by autograd": lambda x, w: checkpoint(forces, x, w, use_reentrant=False),
    "checkpoint_sequential": lambda x, w: checkpoint_sequential([torch.sin, lambda x: x @ w], 2, x, use_reentrant=False),
    "autograd.grad": forces,
    "gradient of a gradient": lambda x, w: grad(lambda x: grad(lambda x: (x @ w).sin().sum())(x).square().sum())(x),
    "hessian": lambda x, w: hessian(lambda row: torch.tanh(row @ w).sum())(x[0]),
    "hessian of primitives": lambda x, w: hessian(lambda row: ops.einsum("d,df->f", row, w).pow(3).sum())(x[0]),
    "hessian of a norm": lambda x, w: hessian(lambda row: ops.rms_norm(row).pow(3).sum())(x[0]),
    "hessian of dropout": lambda x, w: hessian(lambda row: ops.dropout(row**3, 0.5, (1, 2)).sum())(x[0]),
    "hessian-vector product": lambda x, w: jvp(grad(lambda x: (x @ w).sin().sum()), (x,), (w,))[1],
    "jacfwd": lambda x, w: jacfwd(lambda row: torch.tanh(row @ w))(x[0]),
    "jacrev": lambda x, w: jacrev(lambda row: net(row, w))(x[0]),
    "jvp": lambda x, w: jvp(lambda x, w: ops.einsum("ab,bc->ac", x.sin(), w), (x, w), (w, x))[1],
    "marks": lambda x, w: jvp(lambda x: grad(lambda x: ops.constrain(ops.name(x.sin(), "s"), P("b")).sum())(x), (x,), (w,))[1],
    "module": module,
    "one_hot": lambda x, w: grad(lambda w: (F.one_hot(x.argmax(-1), 8) * w.sin()).sum())(w),
    "per-sample gradients": lambda x, w: vmap(grad(lambda w, row: net(row, w).sum()), in_dims=(None, 0))(w, x),
    "vmap": lambda x, w: vmap(lambda row: torch.outer(row, row) @ w)(x).sum(1),
    "vmap over columns": lambda x, w: vmap(lambda column: column.softmax(0) + w[0], in_dims=1, out_dims=1)(x),
    "vmap of primitives": lambda x, w: vmap(lambda row: ops.swiglu(ops.rms_norm(row), row))(x),
    "vmap of a vmap": lambda x, w: vmap(lambda a: vmap(lambda b: ops.rms_norm(a * b))(w))(x),
    "vmap that writes": lambda x, w: vmap(lambda row: torch.zeros_like(row).index_add_(0, torch.arange(8), row))(x),
}  # fmt: skip


NOT_WITHOUT_MPAR = {
    reentrant: lambda x, w, reentrant=reentrant: grad(lambda w: checkpoint(net, x, w, use_reentrant=reentrant).sum())(w)
    for reentrant in (False, True)
}
"""torch's checkpoint does not work inside torch.func.grad."""


def operands():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]


def simulate(fn, args, specs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops that are computed whole, and torch's own use of torch.jit.script
        return jit(fn, mesh=MESH, in_specs=specs).lower(*args).simulate(*args)


@pytest.mark.parametrize("specs", [(P("a"), P("b")), (P("a", "b"), P(None, "a"))], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transform_is_exact(name, specs):
    """Sharded in two ways."""
    fn, args = FUNCTIONS[name], operands()
    actual = simulate(fn, args, specs)
    testing.assert_close(actual, fn(*args).detach(), name=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_gradient(reentrant):
    """Gives the gradient of the function; what is recomputed is a matter of the program."""
    args = operands()
    actual = simulate(NOT_WITHOUT_MPAR[reentrant], args, (P("a"), P("b")))
    testing.assert_close(actual, grad(lambda w: net(args[0], w).sum())(args[1]))


def test_a_second_derivative_that_a_primitive_lacks_is_refused():
    """With the primitive."""

    def mixed(x):
        return ops.merge_attention(x, x[..., 0], x.sin(), x[..., 1])[0].square().sum()

    with pytest.raises(DifferentiationError, match="cannot differentiate merge_attention_bwd: it has no gradient rule"):
        simulate(lambda x, w: hessian(lambda row: mixed(row.view(1, 1, 2, 4)))(x[0]), operands(), None)


def test_checkpoint_is_itself_outside_of_compiled_functions():
    """Compiling leaves torch's checkpoint as it was."""
    calls = []

    def block(x):
        calls.append(1)
        return x.sin()

    x = operands()[0].requires_grad_()
    jit(lambda x: checkpoint(torch.sin, x, use_reentrant=False), mesh=MESH).lower(x.detach())
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2


def test_value_and_grad_of_several_arguments_with_aux():
    """As in JAX: `((value, aux), gradients)`; keyword arguments are passed on."""

    def loss(x, w, *, scale):
        y = (x @ w).sin() * scale
        return y.sum(), {"mean": y.mean(), "nothing": None}

    x, w = operands()
    fn = value_and_grad(loss, argnums=(0, 1), has_aux=True)
    lowered = jit(lambda x, w: fn(x, w, scale=2.0), mesh=MESH, in_specs=(P("a"), P(None, "b"))).lower(x, w)
    (value, aux), grads = lowered.simulate(x, w)
    expected = 2 * (x @ w).cos()
    assert aux["nothing"] is None
    testing.assert_close(value, 2 * (x @ w).sin().sum(), name="value")
    testing.assert_close(aux["mean"], 2 * (x @ w).sin().mean(), name="aux")
    testing.assert_close(grads[0], expected @ w.T, name="dx")
    testing.assert_close(grads[1], x.T @ expected, name="dw")
