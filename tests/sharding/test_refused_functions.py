"""Functions that cannot be compiled: one error of mpar with the op, its line and a way out, whatever torch would have said."""

import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from mpar import Mesh, P, jit, ops
from mpar.errors import MparError

X = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
OUTSIDE = torch.zeros(8, dtype=torch.float64)


class Dirty(torch.autograd.Function):
    """It writes into its operand."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@torch.library.custom_op("mpar_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    """An op that does not say which shapes it makes."""
    return x * 2


def branch(x):
    return x if x.sum() > 0 else -x


def until(x):
    while x.sum() < 1:
        x = x + 1
    return x


def heads(x):
    return x.view(1, 2, 8, 4)


BAD = {
    "a mask as an index": (lambda x: x[x > 0], "nonzero"),
    "a wrong batch of vmap": (lambda x: torch.func.vmap(torch.add)(x, x[:3]), "same size in the mapped dimension"),
    "a wrong dtype": (lambda x: torch.bmm(x[None], x[None].long()), "bmm"),
    "a wrong dtype of a primitive": (lambda x: ops.rms_norm(x.long()), "rms_norm"),
    "a wrong index": (lambda x: x[9], "__getitem__"),
    "a wrong shape": (lambda x: x @ x[:3], "mm"),
    "a wrong shape in einsum": (lambda x: torch.einsum("ab,bc->ac", x, x[:3]), "einsum"),
    "a wrong shape in a primitive": (lambda x: ops.einsum("ab,bc->ac", x, x[:3]), "einsum"),
    "a wrong view": (lambda x: x.view(7, -1), "view"),
    "another trace": (lambda x: torch.func.linearize(torch.sin, x)[1](x) * 2, "linearize"),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 1)), "as_strided"),
    "assignment to data": (lambda x: setattr(x, "data", x + 1) or x, "data"),
    "autograd.Function that writes": (lambda x: torch.func.grad(lambda x: Dirty.apply(x * 1).sum())(x), "marks 1 operands dirty"),
    "backward": (lambda x: x.sum().backward(), "backward"),
    "branch": (branch, "_local_scalar_dense"),
    "bincount": (lambda x: torch.bincount(x[0].long()), "bincount"),
    "comparison of data": (lambda x: x if torch.equal(x, x * 2) else -x, "equal"),
    "cond by many": (lambda x: torch.cond(x > 0, torch.sin, torch.cos, (x,)), "torch.where"),
    "cond by a number": (lambda x: torch.cond(x.sum(), torch.sin, torch.cos, (x,)), "one truth value"),
    "cond of other results": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.sum, (x,)),
        "result 0: float64[8, 8] and float64[]",
    ),
    "cond that writes": (lambda x: torch.cond(x.sum() > 0, lambda y: y.add_(1), torch.cos, (x.clone(),)), "add_"),
    "custom_op without shapes": (lambda x: no_fake(x), "register_fake"),
    "flex_attention": (lambda x: flex_attention(heads(x), heads(x), heads(x), score_mod=lambda s, *_: s * 2), "ops.attention"),
    "float": (lambda x: x * float(x.sum()), "_local_scalar_dense"),
    "gradient of several numbers": (lambda x: torch.func.grad(torch.sin)(x), "scalar"),
    "item": (lambda x: x * x.sum().item(), "_local_scalar_dense"),
    "lstsq": (lambda x: torch.linalg.lstsq(x, x).solution, "torch.linalg.qr"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:3]]), "nested"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "numpy"),
    "numpy's functions": (lambda x: numpy.sin(x), "__array__"),
    "one_hot of unknown size": (lambda x: F.one_hot(x[0].long()), "num_classes"),
    "out": (lambda x: torch.mul(x, 2, out=x), "argument 0"),
    "outside": (lambda x: OUTSIDE.copy_(x[0]), "from outside"),
    "quantised": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "quantize_per_tensor"),
    "rand": (lambda x: x + torch.rand(8, 8), "random_uniform"),
    "repeat_interleave by data": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), "repeat_interleave"),
    "scan of another shape": (
        lambda x: scan(lambda c, row: (torch.cat([c, row]), row * 2), x[0], x),
        "float64[8] and float64[16]",
    ),
    "scan of one result": (lambda x: scan(lambda c, row: c + row, x[0], x), "no pair"),
    "scan of unlike lengths": (lambda x: scan(lambda c, row: (c + row[0], row[1]), x[0], (x, x[:4])), "numbers of slices"),
    "scan that reads data": (
        lambda x: scan(lambda c, row: (c + row if row[0] > 0 else c, row * 2), x[0], x),
        "_local_scalar_dense",
    ),
    "scan that writes a captured tensor": (
        lambda x: scan(lambda c, row: (c + x.add_(1)[0], row * 2), x[0], x.sin()),
        "from outside",
    ),
    "sparse": (lambda x: x.to_sparse(), "_to_sparse"),
    "text in the place of a number": (lambda x: torch.sum(x, "a"), "sum"),
    "tolist": (lambda x: torch.tensor(x.tolist()), "tolist"),
    "torch.compile": (lambda x: torch.compile(torch.sin)(x), "without torch.compile"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "unknown attribute": (lambda x: x.softmaxx(-1), "softmaxx"),
    "until": (until, "_local_scalar_dense"),
    "gradient of while_loop": (
        lambda x: torch.func.grad(lambda x: while_loop(lambda y: y.sum() < 3, lambda y: (y * 2,), (x,))[0].sum())(x),
        "Use scan",
    ),
    "while_loop of another shape": (
        lambda x: while_loop(lambda y: y.sum() < 3, lambda y: (y[0],), (x,)),
        "float64[8, 8] and float64[8]",
    ),
    "while_loop by many": (lambda x: while_loop(lambda y: y < 3, lambda y: (y * 2,), (x,)), "one truth value"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_error_with_op_line_and_way_out(name, capfd):
    """Short, and without logs of torch beside it; a line of torch is not the user's."""
    fn, word = BAD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, and of ops that are computed whole
        with pytest.raises(MparError) as caught:
            jit(fn, mesh=Mesh(a=2), in_specs=P("a")).lower(X)
    text = str(caught.value)
    assert word in text
    assert caught.match(r"sharding/test_refused_functions.py:\d+")
    assert len(text) <= 1000 and text.count("\n") <= 8
    assert "Traceback" not in capfd.readouterr().err
    assert not OUTSIDE.any()


class Problem(Exception):
    """An error of the user's own."""


def fail(x):
    raise Problem("mine")


OWN = {
    "raised": (fail, Problem),
    "raised in a gradient": (lambda x: torch.func.grad(fail)(x), Problem),
    "raised in a vmap": (lambda x: torch.func.vmap(fail)(x), Problem),
    "of Python": (lambda x: {}["a"] * x, KeyError),
    "an assertion": (lambda x: pytest.fail("mine") if x.ndim > 1 else x, pytest.fail.Exception),
}


@pytest.mark.parametrize("name", OWN)
def test_errors_of_the_function_itself_stay(name):
    """What the user's code raises passes through unchanged."""
    fn, kind = OWN[name]
    with pytest.raises(kind) as caught:
        jit(fn, mesh=Mesh(a=2), in_specs=P("a")).lower(X)
    assert caught.type is kind and not isinstance(caught.value, MparError)
