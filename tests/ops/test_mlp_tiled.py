"""The tiled feed-forward layer against the whole one in float64, and the memory that it takes."""

import math

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing, value_and_grad
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._mlp_tiled import mlp_tiled_p, mlp_tiled_x_bwd_p
from tests.ops.storages import Storages

F64 = torch.float64
ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def whole(activation, x, up, down, gate=None):
    """All tokens at once, by plain products."""
    act = ACTIVATIONS[activation]
    return (act(x @ up) if gate is None else act(x @ gate) * (x @ up)) @ down


def tiled(activation, chunk):
    return lambda x, up, down, gate=None: ops.mlp_tiled(x, gate, up, down, activation=activation, chunk=chunk)


def operands_of(make_tensor, shape, num_hidden, gated, dtype=F64):
    D = shape[-1]
    weights = [make_tensor((D, num_hidden), dtype), make_tensor((num_hidden, D), dtype)]
    return [make_tensor(shape, dtype), *weights, *([make_tensor((D, num_hidden), dtype)] if gated else [])]


@pytest.mark.parametrize("shape", [(2, 5, 4), (7, 4), (4,), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tiles_are_the_whole(activation, gated, chunk, shape, make_tensor):
    """The result and the gradients of x and of all weights, whatever the size of tiles."""
    operands = operands_of(make_tensor, shape, 6, gated)
    expected, pull = testing.vjp(lambda *o: whole(activation, *o), *operands)
    y, pull_back = testing.vjp(tiled(activation, chunk), *operands)
    testing.assert_close(y, expected, name="y")
    dy = make_tensor(shape, F64)
    names = ("dx", "dup", "ddown", "dgate")[: len(operands)]
    for got, want, name in zip(pull_back(dy), pull(dy), names, strict=True):
        testing.assert_close(got, want, name=name)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_frozen_weights_have_no_gradients_and_cost_none(activation, gated, make_tensor):
    """The gradient of x alone is the same, bit for bit, without the products that give gradients of weights."""
    x, *weights = operands_of(make_tensor, (2, 5, 4), 6, gated)
    x.requires_grad_()
    trained = [weight.clone().requires_grad_() for weight in weights]
    ys = [tiled(activation, 3)(x, *given) for given in (trained, weights)]
    grads = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in ys]
    assert torch.equal(*grads)
    up, down, *gate = weights
    operands, params = (x, gate[0] if gated else None, up, down, x), {"activation": activation, "chunk": 3}
    every, alone = (primitive.cost(*operands, **params) for primitive in (mlp_tiled_p.bwd, mlp_tiled_x_bwd_p))
    assert every.flops - alone.flops == 2 * len(weights) * x.numel() * 6
    assert alone.flops == 2 * (2 * len(weights) - 1) * x.numel() * 6
    with Storages() as mode:
        dx = mlp_tiled_x_bwd_p.impl(*(None if operand is None else operand.detach() for operand in operands), **params)
    assert mode.peak <= alone.workspace + dx.nbytes
    assert alone.workspace <= every.workspace


def test_transposed_operands(make_tensor):
    """Tokens, weights and a cotangent that are views."""
    x, up, down, gate = operands_of(make_tensor, (4, 3), 6, True)
    views = [x.T.contiguous().T.unsqueeze(0), up.T.contiguous().T, down.T.contiguous().T, gate.T.contiguous().T]
    y, pull_back = testing.vjp(tiled("silu", 3), *views)
    expected, pull = testing.vjp(lambda *o: whole("silu", *o), *views)
    testing.assert_close(y, expected, name="y")
    dy = make_tensor((1, 3, 4), F64).transpose(1, 2)
    for got, want in zip(pull_back(dy), pull(dy), strict=True):
        testing.assert_close(got, want)


@pytest.mark.parametrize("batched", [(0, None), (0, 0), (1, None)], ids=str)
def test_batches(batched, make_tensor):
    """vmap over tokens, or over tokens and weights, gives what each example gives."""
    x, up, down = make_tensor((3, 3, 4), F64), make_tensor((3, 4, 6), F64), make_tensor((3, 6, 4), F64)
    weights = (up, down) if batched[1] == 0 else (up[0], down[0])
    y = torch.vmap(tiled("silu", 2), (batched[0], batched[1], batched[1]))(x, *weights)
    for i in range(3):
        own = [w[i] for w in weights] if batched[1] == 0 else weights
        testing.assert_close(y[i], whole("silu", x.select(batched[0], i), *own))


def test_gradients_of_weights_are_summed_in_float32(make_tensor):
    """4096 tiles of one token: a sum in bfloat16 would stop growing."""
    x, up, down = torch.ones(4096, 1), torch.ones(1, 1), torch.ones(1, 1)
    operands = [t.bfloat16().requires_grad_() for t in (x, up, down)]
    y = tiled("silu", 1)(*operands)
    grads = torch.autograd.grad(y.sum(), operands[1:])
    wide = [t.double().requires_grad_() for t in (x, up, down)]
    expected = torch.autograd.grad(whole("silu", *wide).sum(), wide[1:])
    for got, want in zip(grads, expected, strict=True):
        testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nothing_has_the_size_of_all_hidden_values(activation, gated, dtype, make_tensor):
    """The largest storage is a tile or an operand; what is alive is no more than results and the workspace that is said."""
    S, D, hidden, chunk = 1000, 2, 256, 50
    x, up, down, *gate = operands_of(make_tensor, (S, D), hidden, gated, dtype)
    operands, params = (x, gate[0] if gated else None, up, down), {"activation": activation, "chunk": chunk}
    with Storages() as forward:
        y = mlp_tiled_p.impl(*operands, **params)
    with Storages() as backward:
        grads = mlp_tiled_p.bwd.impl(*operands, x, **params)
    for mode, primitive, results, more in ((forward, mlp_tiled_p, [y], ()), (backward, mlp_tiled_p.bwd, grads, (x,))):
        assert chunk * hidden * x.element_size() <= mode.largest <= 4 * max(chunk * hidden, S * D)
        assert mode.largest < S * hidden * x.element_size() / 10
        assert mode.peak <= primitive.cost(*operands, *more, **params).workspace + sum(r.nbytes for r in results)


def test_only_operands_are_kept_for_the_backward_pass(make_tensor):
    """Whatever autograd saves is an operand."""
    operands = [t.requires_grad_() for t in operands_of(make_tensor, (8, 4), 6, True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda _: None):
        tiled("silu", 2)(*operands)
    assert set(kept) <= {t.data_ptr() for t in operands}


@pytest.mark.parametrize("axis", ["tokens", "hidden"])
def test_shards_add_up(axis, make_tensor):
    """On four ranks that share tokens, or the hidden dim: the value and all gradients."""
    operands = [make_tensor((2, 4, 4), F64), *operands_of(make_tensor, (8, 4), 8, True)[1:]]
    step = value_and_grad(lambda o: (tiled("silu", 3)(*o) ** 2).sum())
    specs = (P(None, "x"), P(), P(), P()) if axis == "tokens" else (P(), P(None, "x"), P("x"), P(None, "x"))
    sharded = jit(step, mesh=Mesh(x=4), in_specs=(specs,), out_specs=(P(), specs)).lower(tuple(operands))
    assert {collective.op for collective in sharded.collectives()} == {"all_reduce"}
    value, grads = sharded.simulate(tuple(operands))
    wide = [t.clone().requires_grad_() for t in operands]
    expected = (whole("silu", *wide) ** 2).sum()
    testing.assert_close(value, expected, name="value")
    for got, want in zip(grads, torch.autograd.grad(expected, wide), strict=True):
        testing.assert_close(got, want)


def test_refuses_what_does_not_fit(make_tensor):
    """Shapes, dtypes, names and numbers are named."""
    x, up, down, gate = operands_of(make_tensor, (3, 4), 6, True)
    with pytest.raises(ShapeError, match=r"down \(4, 6\)"):
        ops.mlp_tiled(x, gate, up, down.T, chunk=2)
    with pytest.raises(ShapeError, match=r"gate \(6, 4\)"):
        ops.mlp_tiled(x, gate.T, up, down, chunk=2)
    with pytest.raises(DtypeError, match=r"'up': torch\.float32"):
        ops.mlp_tiled(x, gate, up.float(), down, chunk=2)
    with pytest.raises(ConfigError, match="activation is 'relu'"):
        ops.mlp_tiled(x, gate, up, down, activation="relu", chunk=2)
    with pytest.raises(ConfigError, match="chunk is 0"):
        ops.mlp_tiled(x, gate, up, down, chunk=0)
