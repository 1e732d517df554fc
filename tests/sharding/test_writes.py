"""Functions that write into tensors which they have made themselves are pure from outside, so they compile."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, ops, testing, value_and_grad
from mpar.errors import TraceError
from mpar.sharding import ReplicatedFallback

MESH = Mesh(a=2, b=2)
CLOSED_OVER = torch.zeros(8, dtype=torch.float64)


def made(x):
    """A tensor that the function makes itself."""
    return torch.zeros(x.shape, dtype=x.dtype)


def slices(x, w):
    y = made(x)
    y[:, 1:] = x[:, :-1]
    y[2:4] += w[2:4]
    y[:, ::2] *= 2
    return y


def rows(x, w):
    y = torch.empty_like(x)
    for i in range(8):
        y[i] = x[7 - i] * w[0]
    y[0, 3] = 5.0
    return y


def through_views(x, w):
    y = x.clone()
    y.view(-1)[3:] = w.reshape(-1)[:-3]
    y.view(4, 2, 8)[:, 0].t()[1] = 7
    y.transpose(0, 1)[1].add_(w[1])
    y[:4].mul_(w[4:])
    return y


def masks(x, w):
    y = x * w
    y[x > 0] = 0
    y[w[0] > 0] = -1.0
    y[x > 1] = w[2, 3]
    y.masked_fill_(w > 0.5, 3.0)
    return y


def whole(x, w):
    y = torch.empty(8, 8, dtype=x.dtype)
    y.copy_(w[0])
    z = torch.full_like(y, 2.0).zero_().fill_(w.sum())
    y += z
    y -= x
    y /= 1 + w * w
    return F.relu(y, inplace=True)


def by_index(x, w):
    y = made(x)
    y[torch.tensor([1, 5])] = x[:2]
    y[:, torch.tensor([0, 3])] = w[:, :2]
    y.index_add_(0, torch.tensor([0, 1, 1]), w[:3])
    y.scatter_(1, torch.tensor([[1], [2]]), x[:2, :1])
    return y


def accumulated(x, w):
    total = torch.zeros(8, dtype=x.dtype)
    for row in x.unbind(0):
        total = total.sin()
        total += row * w[0]
    return total


def diagonals(x, w):
    y = x.clone()
    y.diagonal().add_(1)
    return y @ w


def results_of_out(x, w):
    y = torch.empty(8, 8, dtype=x.dtype)
    torch.mul(x, w, out=y)
    return y


def parts_of_complex(x, w):
    y = torch.complex(x, w)
    y.real.mul_(2)
    torch.view_as_real(y)[..., 1] += 1
    return torch.view_as_real(y).transpose(1, 2)


def norm_with_statistics(x, w):
    mean, var = torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)
    return F.batch_norm(x * w, mean, var, training=True) + mean


def gradients_of_torch_that_write(x, w):
    values = torch.linalg.eigvalsh(x @ x.T) + torch.linalg.cholesky(w @ w.T + 8 * torch.eye(8, dtype=w.dtype))
    return values + torch.fft.irfft(torch.fft.rfft(x) * 2)


def with_a_primitive(x, w):
    y = made(x)
    y[:4] = ops.rms_norm(x[:4])
    y[4:] = ops.swiglu(x[4:], w[4:])
    return y


FUNCTIONS = [
    slices, rows, through_views, masks, whole, by_index, accumulated, diagonals, results_of_out, parts_of_complex,
    norm_with_statistics, gradients_of_torch_that_write, with_a_primitive,
]  # fmt: skip
NO_GRADIENT = {results_of_out}  # torch has no gradient for out=
SPECS = [(P("a"), P()), (P(None, "b"), P("a")), (P("a", "b"), P("b", "a")), (P(partial="a"), P("b"))]


def operands():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]


def simulate(fn, args, in_specs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        return jit(fn, mesh=MESH, in_specs=in_specs).lower(*args).simulate(*args)


@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_writes_are_exact(fn, specs):
    """Value and gradients are those of the plain function."""
    args = operands()
    testing.assert_close(simulate(fn, args, specs), fn(*args), name="value")
    if fn in NO_GRADIENT:
        return

    def gradients(x, w):
        return torch.func.grad(lambda both: (fn(*both) * torch.arange(8.0, dtype=x.dtype)).sin().sum())((x, w))

    for index, (actual, expected) in enumerate(zip(simulate(gradients, args, specs), gradients(*args), strict=True)):
        testing.assert_close(actual, expected, name=f"gradient {index}")


def test_arguments_stay_as_they_are():
    """Tensors that are copied before the write are not changed, nor is the graph's input."""

    def fn(x):
        before, y = x, x.clone()
        y[0] = 1
        return before + y

    (x, _) = operands()
    expected = fn(x)
    testing.assert_close(simulate(fn, (x,), P("a")), expected, name="value")


def write_through_a_view(x):
    x.view(-1)[0] = 1
    return x * 2


def write_in_a_gradient(x):
    return torch.func.grad(lambda w: (x.mul_(2) * w).sum())(x + 1)


def write_outside(x):
    CLOSED_OVER[0] = x.sum()
    return x * CLOSED_OVER


def add_outside(x):
    CLOSED_OVER.add_(1)
    return x * CLOSED_OVER


def turn(x):
    return x.t_() * 2


HERE = r"sharding/test_writes.py:\d+"
REFUSED = [
    (write_through_a_view, f"__setitem__ at {HERE} writes into argument 0: write into a copy"),
    (write_in_a_gradient, f"mul_ at {HERE} fails.\nRuntimeError: During a grad .* mutate a captured Tensor"),
    (turn, f"t_ at {HERE} writes into argument 0: write into a copy"),
    (write_outside, f"copy_.* at {HERE} writes into a tensor from outside the function: make it an argument"),
    (add_outside, f"add_.* at {HERE} writes into a tensor from outside the function: make it an argument"),
]


@pytest.mark.parametrize(("fn", "pattern"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_writes_that_others_see_are_refused(fn, pattern):
    """With the line and what to do; nothing is written."""
    (x, _) = operands()
    with pytest.raises(TraceError, match=pattern):
        jit(fn, mesh=MESH).lower(x)
    assert not CLOSED_OVER.any()
    assert torch.equal(x, operands()[0])


def test_a_written_batch_needs_no_communication():
    """Writes along dims that are not sharded stay local, in the value and in the gradients."""

    def loss(w, x):
        h = x * w
        y = torch.zeros_like(h)
        y[:, 1:] = h[:, :-1]
        y[:, 0] = 1
        y[h > 0] = 0
        y[:, 5] += 3
        return y.square().sum()

    x, w = operands()
    lowered = jit(value_and_grad(loss), mesh=Mesh(a=4), in_specs=(P(), P("a"))).lower(w[0], x)
    assert [c.op for c in lowered.collectives()] == ["all_reduce", "all_reduce"]
