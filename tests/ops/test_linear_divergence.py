"""The divergence of two models from their features: formula, gradients, both limits, padding, memory."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._linear_divergence import linear_divergence_p, linear_divergence_x_bwd_p
from tests.ops.storages import Storages

BETAS = [0.0, 0.1, 0.5, 1.0]


def reference(x, head, y, other, beta, temperature, vocab_size):
    """The divergence of each token from probabilities, in float64."""
    s = torch.softmax((x.double() @ head.double())[..., :vocab_size] / temperature, -1)
    t = torch.softmax((y.double() @ other.double())[..., :vocab_size] / temperature, -1)
    m = beta * t + (1 - beta) * s
    forward, backward = (t * (t / s).log()).sum(-1), (s * (s / t).log()).sum(-1)
    mixed = beta * (t * (t / m).log()).sum(-1) + (1 - beta) * (s * (s / m).log()).sum(-1)
    return forward if beta == 0 else backward if beta == 1 else mixed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("temperature", "vocab_size", "chunk"), [(1.0, 11, 4), (0.7, 9, 100), (2.0, 11, 1)])
def test_matches_float64(beta, temperature, vocab_size, chunk, dtype, make_tensor):
    """Divergences, and gradients of features and matrix, are those of probabilities; padding has no gradient."""
    x, head = make_tensor((2, 5, 6), dtype, requires_grad=True), make_tensor((6, 11), dtype, requires_grad=True)
    y, other = make_tensor((2, 5, 3), dtype), make_tensor((3, 11), dtype)
    options = {"beta": beta, "temperature": temperature, "vocab_size": vocab_size}
    found, agreement = ops.linear_divergence(x, head, y, other, **options, chunk=chunk)
    wide = [operand.detach().double().requires_grad_() for operand in (x, head)]
    expected = reference(*wide, y, other, *options.values())
    testing.assert_close(found, expected, name="divergence", rtol=testing.TOLERANCES[dtype])
    weights = torch.linspace(-1, 2, 10, dtype=torch.float64).view(2, 5)
    grads = torch.autograd.grad(found, (x, head), weights.to(found.dtype))
    for name, grad, want in zip(("dx", "dhead"), grads, torch.autograd.grad(expected, wide, weights), strict=True):
        assert grad.dtype == dtype
        testing.assert_close(grad, want, name=name, rtol=testing.TOLERANCES[dtype])
    assert not grads[1][:, vocab_size:].any()
    best = [(a.double() @ b.double())[..., :vocab_size].argmax(-1) for a, b in ((x.detach(), head.detach()), (y, other))]
    if dtype == torch.float64:
        assert torch.equal(agreement, (best[0] == best[1]).double())


@pytest.mark.parametrize("beta", BETAS)
def test_a_frozen_head_has_no_gradient_and_costs_none(beta, make_tensor):
    """The gradient of the features alone is the same, bit for bit, by one product less."""
    x, head = make_tensor((7, 6), torch.float32, requires_grad=True), make_tensor((6, 11), torch.float32, requires_grad=True)
    y, other = make_tensor((7, 3), torch.float32), make_tensor((3, 11), torch.float32)
    both, alone = (ops.linear_divergence(x, matrix, y, other, beta=beta, chunk=4)[0] for matrix in (head, head.detach()))
    grads = [torch.autograd.grad(value.sum(), x)[0] for value in (both, alone)]
    assert torch.equal(*grads)
    meta = [torch.empty_like(operand, device="meta") for operand in (x, head, y, other)]
    params = {"beta": beta, "temperature": 1.0, "vocab_size": 11, "start": 0, "chunk": 4}
    of_tokens = [meta[0][:, 0]] * 4
    costs = [p.cost(*meta, *of_tokens, **params).flops for p in (linear_divergence_p.bwd, linear_divergence_x_bwd_p)]
    assert costs[0] - costs[1] == 2 * x.numel() * 11
    assert costs[1] == 2 * 11 * (2 * x.numel() + y.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_nothing_has_the_size_of_all_logits(beta, dtype, make_tensor):
    """The largest storage is the logits of a chunk, and what is alive is no more than results and the workspace that is said."""
    T, V, chunk = 2000, 300, 64
    x, head, y, other = (make_tensor(shape, dtype) for shape in ((T, 4), (4, V), (T, 3), (3, V)))
    params = {"beta": beta, "temperature": 0.9, "vocab_size": V, "start": 0, "chunk": chunk}
    with Storages() as forward:
        results = linear_divergence_p.impl(x, head, y, other, **params)
    kept = (*results[2:], torch.ones_like(results[0]))
    with Storages() as backward:
        grads = linear_divergence_p.bwd.impl(x, head, y, other, *kept, **params)
    with Storages() as narrow:
        dx = linear_divergence_x_bwd_p.impl(x, head, y, other, *kept, **params)
    cases = (
        (forward, linear_divergence_p, results, ()),
        (backward, linear_divergence_p.bwd, grads, kept),
        (narrow, linear_divergence_x_bwd_p, [dx], kept),
    )
    for mode, primitive, made, more in cases:
        assert mode.largest <= 4 * chunk * V
        workspace = primitive.cost(x, head, y, other, *more, **params).workspace
        assert mode.peak <= workspace + sum(value.nbytes for value in made)
        assert workspace < T * V * x.element_size()


def test_distributions_that_are_equal_agree():
    """Of a model and itself the divergence and its gradient are 0."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for beta in BETAS:
        found, agreement = ops.linear_divergence(x, head, x.detach(), head, beta=beta)
        assert found.abs().max() < 1e-15
        assert agreement.min() == 1
        assert torch.autograd.grad(found.sum(), x)[0].abs().max() < 1e-15


def test_what_does_not_fit_is_refused(make_tensor):
    """Shapes, dtypes and options, with what they are."""
    x, head, y, other = (make_tensor(shape) for shape in ((5, 4), (4, 9), (5, 3), (3, 9)))
    with pytest.raises(ShapeError, match=r"other \(3, 8\)"):
        ops.linear_divergence(x, head, y, other[:, :8], beta=0.5)
    with pytest.raises(DtypeError, match="bfloat16"):
        ops.linear_divergence(x, head, y.bfloat16(), other, beta=0.5)
    with pytest.raises(ConfigError, match=r"beta=1.5"):
        ops.linear_divergence(x, head, y, other, beta=1.5)
