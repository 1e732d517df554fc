"""Every differentiable op against plain formulas in float64: values, gradients by all routes, vmap, second derivatives."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mpar import ops, testing

LABELS = torch.tensor([[0, 3, -100, 6, 1], [2, 2, 5, -100, 4], [6, 0, 1, 3, 3]])
IDS = torch.tensor([[0, 4, 4], [1, 0, 4]])
ANGLES = torch.linspace(0.1, 4.0, 15, dtype=torch.float64).view(1, 5, 3)


@dataclass(frozen=True)
class Case:
    """An op, the same in plain formulas, and the shapes of its operands."""

    name: str
    op: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _rope_halves(x: Tensor) -> Tensor:
    cos, sin = ANGLES.to(x.dtype).cos().unsqueeze(2), ANGLES.to(x.dtype).sin().unsqueeze(2)
    first, second, rest = x[..., :3], x[..., 3:6], x[..., 6:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def _rope_pairs(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(ANGLES), ANGLES).unsqueeze(2)
    pairs = torch.complex(x[..., 0:6:2], x[..., 1:6:2]) * turns
    return torch.cat([torch.view_as_real(pairs).flatten(-2).to(x.dtype), x[..., 6:]], -1)


def _tables(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return ANGLES.double().cos().to(wide), ANGLES.double().sin().to(wide)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("bsnh,bmnh->bnsm", q, k) / 6**0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.exp(scores).masked_fill(hidden, 0.0)
    out = torch.einsum("bnsm,bmnh->bsnh", weights / weights.sum(-1, keepdim=True), v)
    return torch.cat([out, weights.sum(-1).log().transpose(1, 2).unsqueeze(-1)], -1)


def _attention_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = ops.attention(q, k, v)
    return torch.cat([out, lse.unsqueeze(-1).to(out.dtype)], -1)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _cross_entropy(logits: Tensor) -> Tensor:
    known = LABELS != -100
    picked = torch.log(torch.exp(logits).sum(-1)) - logits.gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(known, picked, 0.0).sum()


CASES = [
    Case(
        "einsum",
        lambda x, w: ops.einsum("bsd,dnh->bsnh", x, w),
        lambda x, w: torch.tensordot(x, w, 1),
        ((2, 3, 5), (5, 2, 7)),
    ),
    Case("embedding", lambda t: ops.embedding(IDS, t), lambda t: t[IDS], ((5, 3),)),
    Case("rms_norm", ops.rms_norm, _rms_norm, ((2, 3, 7), (7,))),
    Case("layer_norm", ops.layer_norm, _layer_norm, ((2, 3, 7), (7,), (7,))),
    Case("rope_halves", lambda x: ops.rope(x, *_tables(x)), _rope_halves, ((2, 5, 3, 8),)),
    Case("rope_pairs", lambda x: ops.rope(x, *_tables(x), interleaved=True), _rope_pairs, ((2, 5, 3, 8),)),
    Case("attention", _attention_op, _attention, ((2, 5, 4, 6), (2, 5, 2, 6), (2, 5, 2, 3))),
    Case("swiglu", ops.swiglu, lambda g, u: g / (1 + torch.exp(-g)) * u, ((2, 3, 7), (2, 3, 7))),
    Case("geglu", ops.geglu, lambda g, u: _gelu(g) * u, ((2, 3, 7), (2, 3, 7))),
    Case("geglu_tanh", lambda g, u: ops.geglu(g, u, "tanh"), lambda g, u: _gelu_tanh(g) * u, ((2, 3, 7), (2, 3, 7))),
    Case("cross_entropy", lambda x: ops.cross_entropy(x, LABELS)[0], _cross_entropy, ((3, 5, 7),)),
    Case(
        "linear_cross_entropy",
        lambda x, w: ops.linear_cross_entropy(x, w, LABELS, chunk=4)[0],
        lambda x, w: _cross_entropy(x @ w),
        ((3, 5, 6), (6, 7)),
    ),
    Case("sum_squares", ops.sum_squares, lambda x: (x * x).sum(), ((3, 41, 67),)),
    Case("sum_squares_of_vector", ops.sum_squares, lambda x: (x * x).sum(), ((5,),)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def _reference(case: Case, operands: list[Tensor], dy: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Value, gradients by torch.autograd and cotangent, in float64."""
    doubles = [x.detach().double().requires_grad_() for x in operands]
    y = case.formula(*doubles)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape) if dy is None else dy.double()
    return y.detach(), torch.autograd.grad(y, doubles, dy), dy


@each_dtype
@each_case
def test_matches_float64(case, dtype, make_tensor):
    """The value and the gradients of `.backward()` agree with autograd on plain formulas in float64."""
    operands = [make_tensor(shape, dtype, requires_grad=True) for shape in case.shapes]
    y = case.op(*operands)
    expected, grads, dy = _reference(case, operands)
    testing.assert_close(y, expected, name="y", rtol=testing.TOLERANCES[dtype])
    y.backward(dy.to(y.dtype))
    for i, (x, grad) in enumerate(zip(operands, grads, strict=True)):
        assert x.grad.dtype == dtype
        testing.assert_close(x.grad, grad, name=f"gradient {i}")


@each_case
def test_functional_transforms_agree(case, make_tensor):
    """torch.func.vjp and torch.func.grad give the same gradients."""
    operands = [make_tensor(shape, torch.float64) for shape in case.shapes]
    _, grads, dy = _reference(case, operands)
    _, pull_back = testing.vjp(case.op, *operands)
    by_grad = torch.func.grad(lambda *xs: (case.op(*xs) * dy).sum(), argnums=tuple(range(len(operands))))(*operands)
    for a, b, expected in zip(pull_back(dy), by_grad, grads, strict=True):
        testing.assert_close(a, expected, name="vjp")
        testing.assert_close(b, expected, name="grad")


@each_case
def test_strided_operands_are_read_right(case, make_tensor):
    """Operands that are not contiguous give the same value and gradients, and contiguous results."""
    operands = [make_tensor(shape, torch.float64) for shape in case.shapes]
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in operands]
    expected, grads, dy = _reference(case, operands)
    y = case.op(*strided)
    testing.assert_close(y, expected, name="y")
    assert y.is_contiguous()
    strided_dy = dy.transpose(0, -1).contiguous().transpose(0, -1) if dy.ndim else dy
    for actual, grad in zip(torch.autograd.grad(y, strided, strided_dy), grads, strict=True):
        testing.assert_close(actual, grad, name="gradient")


@each_case
def test_vmap_equals_a_loop(case, make_tensor):
    """vmap, over all operands or any one of them, and vmap of grad, equal a loop over the examples."""
    fixed = [make_tensor(shape, torch.float64) for shape in case.shapes]
    batched = [make_tensor((2, *shape), torch.float64) for shape in case.shapes]
    choices = [tuple(range(len(fixed))), *((i,) for i in range(len(fixed)))]

    def gradient(*xs: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *ys: case.op(*ys).square().sum(), argnums=tuple(range(len(xs))))(*xs)

    for chosen in choices:
        operands = [batched[i] if i in chosen else fixed[i] for i in range(len(fixed))]
        dims = tuple(0 if i in chosen else None for i in range(len(fixed)))
        examples = [[batched[i][n] if i in chosen else fixed[i] for i in range(len(fixed))] for n in range(2)]
        values = torch.func.vmap(case.op, dims)(*operands)
        testing.assert_close(values, torch.stack([case.op(*xs) for xs in examples]), name=f"vmap {chosen}")
        grads = torch.func.vmap(gradient, dims)(*operands)
        for actual, expected in zip(grads, zip(*(gradient(*xs) for xs in examples), strict=True), strict=True):
            testing.assert_close(actual, torch.stack(expected), name=f"vmap(grad) {chosen}")


@each_case
def test_second_derivative(case, make_tensor):
    """It is that of the plain formula."""
    operands = [make_tensor(shape, torch.float64) for shape in case.shapes]

    def curvature(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        first = torch.func.grad(lambda *xs: fn(*xs).square().sum())
        return torch.func.grad(lambda *xs: first(*xs).square().sum())

    testing.assert_close(curvature(case.op)(*operands), curvature(case.formula)(*operands), name="second derivative")
