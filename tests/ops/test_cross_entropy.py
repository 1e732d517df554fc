"""Cross-entropy: weights, padding columns, extreme logits, smoothed labels, and the vocabulary-parallel programs."""

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing, value_and_grad
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops import _cross_entropy
from mpar.ops._cross_entropy import cross_entropy_grad_p, cross_entropy_p
from mpar.ops._linear_cross_entropy import (
    linear_cross_entropy_grad_p,
    linear_cross_entropy_p,
    linear_cross_entropy_x_bwd_p,
    linear_cross_entropy_x_grad_p,
)

LABELS = torch.tensor([[0, 3, -100, 6, 9], [2, 8, 5, -100, 4]])
KNOWN = LABELS != -100


def _losses(logits, vocab_size=None):
    """Loss per token, 0 where ignored, in float64 by the definition."""
    kept = logits.double()[..., :vocab_size]
    picked = kept.gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(KNOWN, torch.logsumexp(kept, -1) - picked, 0.0)


@pytest.mark.parametrize("vocab_size", [None, 10])
def test_weights_and_padding_columns(vocab_size, make_tensor):
    """Tokens are weighted, ignored ones weigh nothing, padding columns get no probability and no gradient."""
    logits, weights = make_tensor((2, 5, 12), torch.float64, requires_grad=True), make_tensor((2, 5), torch.float64).abs()
    total, weight = ops.cross_entropy(logits, LABELS, token_weights=weights, vocab_size=vocab_size)
    expected = (_losses(logits, vocab_size) * weights).sum()
    testing.assert_close(total, expected, name="sum")
    testing.assert_close(weight, weights[KNOWN].sum(), name="weight")
    (grad,) = torch.autograd.grad(total, logits)
    testing.assert_close(grad, torch.autograd.grad(expected, logits)[0], name="dlogits")
    assert vocab_size is None or not grad[..., vocab_size:].any()


def test_weight_is_the_number_of_labels(make_tensor):
    """Without token_weights, weight counts the tokens that are not ignored."""
    assert ops.cross_entropy(make_tensor((2, 5, 12)), LABELS)[1].item() == 8


@pytest.mark.parametrize("scale", [1e4, 1e30], ids=str)
def test_large_logits_stay_exact(scale, make_tensor):
    """Logits far apart overflow nothing, and the gradient is that of float64."""
    logits = (make_tensor((2, 5, 12)) * scale).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    total, expected = ops.cross_entropy(logits, LABELS)[0], _losses(wide).sum()
    testing.assert_close(total, expected, name="sum")
    testing.assert_close(torch.autograd.grad(total, logits)[0], torch.autograd.grad(expected, wide)[0], name="dlogits")


def test_lse_is_exact_where_the_label_is_impossible(make_tensor):
    """lse keeps its digits when the label's logit is -1e6 or -inf."""
    logits = make_tensor((2, 5, 12))
    logits[0, 0, 0], logits[0, 1, 3] = -1e6, -torch.inf
    _, lse = cross_entropy_p.bind(logits, LABELS, ignore_index=-100, vocab_size=12, start=0, label_smoothing=0.0)
    testing.assert_close(lse, torch.logsumexp(logits.double(), -1), rtol=1e-6)


def test_lse_is_differentiable(make_tensor):
    """The gradient of lse, ignored tokens included, adds to that of the loss."""
    logits = make_tensor((2, 5, 12), torch.float64, requires_grad=True)
    dloss, dlse = make_tensor((2, 5), torch.float64), make_tensor((2, 5), torch.float64)
    loss, lse = cross_entropy_p.bind(logits, LABELS, ignore_index=-100, vocab_size=12, start=0, label_smoothing=0.0)
    for a, b in ((dloss, dlse), (0 * dloss, dlse)):
        (grad,) = torch.autograd.grad((loss * a + lse * b).sum(), logits, retain_graph=True)
        expected = (_losses(logits) * a + torch.logsumexp(logits, -1) * b).sum()
        testing.assert_close(grad, torch.autograd.grad(expected, logits)[0], name="dlogits")


def test_invalid_labels_make_nan(make_tensor):
    """A label that does not exist cannot pass for a token that was learnt, nor read outside the logits."""
    for bad in (12, -1, 10**12):
        labels = LABELS.clone()
        labels[0, 0] = bad
        assert ops.cross_entropy(make_tensor((2, 5, 12)), labels)[0].isnan()


def test_bfloat16_keeps_float32_statistics(make_tensor):
    """From bfloat16 logits the loss has float32's error, not bfloat16's."""
    logits = make_tensor((2, 5, 12), torch.bfloat16)
    total, _ = ops.cross_entropy(logits, LABELS)
    testing.assert_close(total, _losses(logits).sum(), name="sum", rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("vocab_size", [12, 10])
def test_smoothed_labels_are_those_of_torch(vocab_size, smoothing, make_tensor):
    """Value and gradient of smoothed labels are torch's over the columns that are no padding, in both forms."""
    logits, head = make_tensor((2, 5, 12), torch.float64, requires_grad=True), torch.eye(12, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(
        logits[..., :vocab_size].flatten(0, 1), LABELS.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    params = {"vocab_size": vocab_size, "label_smoothing": smoothing}
    for total, _ in (
        ops.cross_entropy(logits, LABELS, **params),
        ops.linear_cross_entropy(logits, head, LABELS, **params, chunk=3),
    ):
        testing.assert_close(total, expected, name="sum")
        testing.assert_close(torch.autograd.grad(total, logits)[0], torch.autograd.grad(expected, logits, retain_graph=True)[0])


def test_smoothing_stays_exact_far_from_zero(make_tensor):
    """Logits that share a large offset lose no digits by smoothing."""
    logits = make_tensor((2, 5, 12)) + 3e4
    total, _ = ops.cross_entropy(logits, LABELS, label_smoothing=0.3)
    expected = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), LABELS.flatten(), label_smoothing=0.3, reduction="sum"
    )
    testing.assert_close(total, expected, name="sum")


@pytest.mark.parametrize("vocab_size", [12, 10])
def test_z_loss_is_the_square_of_lse(vocab_size, make_tensor):
    """Every token that is not ignored adds z_loss lse^2 times its weight, padding columns left out, in both forms."""
    logits, weights = make_tensor((2, 5, 12), torch.float64, requires_grad=True), make_tensor((2, 5), torch.float64).abs()
    lse = torch.logsumexp(logits[..., :vocab_size], -1)
    expected = (_losses(logits, vocab_size) * weights).sum() + 0.3 * (lse.square() * weights)[KNOWN].sum()
    params = {"token_weights": weights, "vocab_size": vocab_size, "z_loss": 0.3}
    head = torch.eye(12, dtype=torch.float64)
    for total, weight in (ops.cross_entropy(logits, LABELS, **params), ops.linear_cross_entropy(logits, head, LABELS, **params)):
        testing.assert_close(total, expected, name="sum")
        testing.assert_close(weight, weights[KNOWN].sum(), name="weight")
        testing.assert_close(torch.autograd.grad(total, logits)[0], torch.autograd.grad(expected, logits, retain_graph=True)[0])


def test_ignored_tokens_add_nothing_at_all(make_tensor):
    """If all tokens are ignored, sum, weight and gradient are 0, smoothed or not, even where their logits are not finite."""
    logits = make_tensor((2, 5, 12))
    logits[0, 0] = torch.inf
    total, weight = ops.cross_entropy(logits, torch.full((2, 5), -100), label_smoothing=0.1, z_loss=0.1)
    assert total.item() == 0 and weight.item() == 0
    logits = make_tensor((2, 5, 12), requires_grad=True)
    total, _ = ops.cross_entropy(logits, torch.full((2, 5), -100), label_smoothing=0.1, z_loss=0.1)
    assert not torch.autograd.grad(total, logits)[0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [3, 1024])
def test_one_pass_gives_the_bits_of_two(chunk, dtype, make_tensor):
    """Losses and gradients made in one pass over the chunks have the bits of the forward and the backward pass."""
    x, head, dloss = make_tensor((2, 5, 7), dtype), make_tensor((7, 12), dtype), make_tensor((2, 5), torch.float32)
    dloss = dloss.to(torch.promote_types(dtype, torch.float32))
    params = {"ignore_index": -100, "vocab_size": 10, "start": 0, "label_smoothing": 0.1, "chunk": chunk}
    loss, lse = linear_cross_entropy_p.bind(x, head, LABELS, **params)
    expected = (loss, lse, *linear_cross_entropy_p.bwd.bind(x, head, LABELS, lse, dloss, None, **params))
    for actual, wanted in zip(linear_cross_entropy_grad_p.bind(x, head, LABELS, dloss, **params), expected, strict=True):
        assert torch.equal(actual, wanted)
    for actual, wanted in zip(linear_cross_entropy_x_grad_p.bind(x, head, LABELS, dloss, **params), expected[:3], strict=True):
        assert torch.equal(actual, wanted)
    dx = linear_cross_entropy_x_bwd_p.bind(x, head, LABELS, lse, dloss, None, **params)
    assert torch.equal(dx, expected[2])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab_size", [12, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradient_over_the_logits_has_the_bits_of_two_ops(dtype, vocab_size, smoothing, make_tensor, monkeypatch):
    """Loss and gradient in one op, block by block, have the bits of the forward and the backward; the gradient is the logits."""
    monkeypatch.setattr(_cross_entropy, "BLOCK", 40)  # blocks of 3 rows, the last of one
    logits, dloss = make_tensor((2, 5, 12), dtype) * 3, make_tensor((2, 5), torch.promote_types(dtype, torch.float32))
    logits[1, 1, 8] = -1e4  # the probability of this label is 0 in any dtype
    params = {"ignore_index": -100, "vocab_size": vocab_size, "start": 0, "label_smoothing": smoothing}
    loss, lse = cross_entropy_p.bind(logits, LABELS, **params)
    dlogits = cross_entropy_p.bwd.bind(logits, LABELS, lse, dloss, None, **params)
    results = cross_entropy_grad_p.bind(logits, LABELS, dloss, **params)
    for actual, wanted in zip(results, (loss, lse, dlogits), strict=True):
        assert torch.equal(actual, wanted)
    assert results[2].data_ptr() == logits.data_ptr() and float(loss[1, 1]) > 8e3


@pytest.mark.parametrize("chunk", [1, 3, 10, 1024])
def test_linear_form_equals_logits_first(chunk, make_tensor):
    """Whatever the chunk, values and gradients are those of cross_entropy of the product."""
    x, head = make_tensor((2, 5, 7), torch.float64, requires_grad=True), make_tensor((7, 12), torch.float64, requires_grad=True)
    weights = make_tensor((2, 5), torch.float64)
    total, weight = ops.linear_cross_entropy(x, head, LABELS, token_weights=weights, vocab_size=10, chunk=chunk)
    expected = (_losses(x @ head, 10) * weights).sum()
    testing.assert_close(total, expected, name="sum")
    testing.assert_close(weight, weights[KNOWN].sum(), name="weight")
    for a, e in zip(torch.autograd.grad(total, (x, head)), torch.autograd.grad(expected, (x, head)), strict=True):
        testing.assert_close(a, e, name="gradient")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("vocab_size", [12, 10, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_vocabulary_parallel_equals_whole(num_ranks, vocab_size, smoothing, make_tensor, run_sharded):
    """Shards of the vocabulary, even of padding alone, give what the whole gives, for one maximum and one sum."""
    logits, labels = make_tensor((2, 5, 12), torch.float64), LABELS.where(vocab_size > LABELS, 1)
    params = {"ignore_index": -100, "vocab_size": vocab_size, "start": 0, "label_smoothing": smoothing}
    loss, lse = cross_entropy_p.bind(logits, labels, **params)
    shards, extents = logits.chunk(num_ranks, -1), {"v": 12 // num_ranks}
    (losses, lses), collectives = run_sharded(cross_entropy_p, "v", extents, shards, labels, **params)
    assert collectives == ["max", "sum"]
    for rank in range(num_ranks):
        testing.assert_close(losses[rank], loss, name="loss")
        testing.assert_close(lses[rank], lse, name="lse")
    dloss, dlse = make_tensor((2, 5), torch.float64), make_tensor((2, 5), torch.float64)
    (grads,), collectives = run_sharded(cross_entropy_p.bwd, "v", extents, shards, labels, lse, dloss, dlse, **params)
    assert collectives == []
    expected = cross_entropy_p.bwd.bind(logits, labels, lse, dloss, dlse, **params)
    testing.assert_close(torch.cat(list(grads), -1), expected, name="dlogits")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_linear_vocabulary_parallel_equals_whole(num_ranks, smoothing, make_tensor, run_sharded):
    """The same for the fused head: its shards' dx are pending sums, their dhead is sharded like the head."""
    x, head = make_tensor((2, 5, 7), torch.float64), make_tensor((7, 12), torch.float64)
    params = {"ignore_index": -100, "vocab_size": 10, "start": 0, "label_smoothing": smoothing, "chunk": 4}
    shards, extents = head.chunk(num_ranks, 1), {"v": 12 // num_ranks}
    loss, lse = linear_cross_entropy_p.bind(x, head, LABELS, **params)
    (losses, lses), collectives = run_sharded(linear_cross_entropy_p, "v", extents, x, shards, LABELS, **params)
    assert collectives == ["max", "sum"]
    testing.assert_close(losses[-1], loss, name="loss")
    testing.assert_close(lses[-1], lse, name="lse")
    dloss, dlse = make_tensor((2, 5), torch.float64), make_tensor((2, 5), torch.float64)
    operands = (LABELS, lse, dloss, dlse)
    (dx, dhead), collectives = run_sharded(linear_cross_entropy_p.bwd, "v", extents, x, shards, *operands, **params)
    assert collectives == []
    expected = linear_cross_entropy_p.bwd.bind(x, head, *operands, **params)
    testing.assert_close(dx[0], expected[0], name="dx")
    (alone,), collectives = run_sharded(linear_cross_entropy_x_bwd_p, "v", extents, x, shards, *operands, **params)
    assert collectives == []
    testing.assert_close(alone[0], expected[0], name="dx alone")
    testing.assert_close(torch.cat(list(dhead), 1), expected[1], name="dhead")


@pytest.mark.parametrize("form", ["logits", "head"])
def test_compiled_ranks_agree_with_one(form, make_tensor):
    """Smoothed labels and z-loss over data- and vocabulary-parallel ranks give the value and gradient of a single device."""
    x, head = make_tensor((2, 5, 7), torch.float64), make_tensor((7, 12), torch.float64)
    params = {"label_smoothing": 0.1, "z_loss": 0.01, "vocab_size": 10}

    def loss(head):
        labels = LABELS.to(head.device)
        if form == "head":
            return ops.linear_cross_entropy(x.to(head.device), head, labels, **params, chunk=3)[0]
        return ops.cross_entropy(ops.einsum("bsd,dv->bsv", x.to(head.device), head), labels, **params)[0]

    spec = P(None, "tp")
    compiled = jit(value_and_grad(loss), mesh=Mesh(dp=2, tp=4), in_specs=spec, out_specs=(P(), spec)).lower(head)
    value, gradient = compiled.simulate(head)
    expected, expected_gradient = value_and_grad(loss)(head)
    testing.assert_close(value, expected, name="sum")
    testing.assert_close(gradient, expected_gradient, name="dhead")


def test_wrong_operands_are_refused(make_tensor):
    """Shapes, dtypes and sizes that do not fit are named."""
    logits, x, head = make_tensor((2, 5, 12)), make_tensor((2, 5, 7)), make_tensor((7, 12))
    with pytest.raises(ShapeError, match="labels \\(2, 4\\)"):
        ops.cross_entropy(logits, LABELS[:, :4])
    with pytest.raises(DtypeError, match="labels torch\\.float32"):
        ops.cross_entropy(logits, LABELS.float())
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        ops.cross_entropy(logits, LABELS, vocab_size=0)
    with pytest.raises(ShapeError, match="token_weights \\(5,\\)"):
        ops.cross_entropy(logits, LABELS, token_weights=torch.ones(5))
    with pytest.raises(ShapeError, match="head \\(12, 7\\)"):
        ops.linear_cross_entropy(x, head.T, LABELS)
    with pytest.raises(DtypeError, match="head is torch\\.float64"):
        ops.linear_cross_entropy(x, head.double(), LABELS)
    with pytest.raises(ConfigError, match="chunk is 0"):
        ops.linear_cross_entropy(x, head, LABELS, chunk=0)
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="label_smoothing is"):
            ops.cross_entropy(logits, LABELS, label_smoothing=bad)
        with pytest.raises(ConfigError, match="label_smoothing is"):
            ops.linear_cross_entropy(x, head, LABELS, label_smoothing=bad)
    for bad in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="z_loss is"):
            ops.cross_entropy(logits, LABELS, z_loss=bad)
    params = {"ignore_index": -100, "vocab_size": 12, "start": 0, "label_smoothing": 0.0, "chunk": 4}
    with pytest.raises(ShapeError, match="cross_entropy_grad: dloss \\(5,\\)"):
        cross_entropy_grad_p.bind(logits, LABELS, torch.ones(5), **{k: v for k, v in params.items() if k != "chunk"})
    with pytest.raises(ShapeError, match="only contiguous ones can be overwritten"):
        cross_entropy_grad_p.bind(
            logits.mT.contiguous().mT, LABELS, torch.ones(2, 5), **{k: v for k, v in params.items() if k != "chunk"}
        )
    with pytest.raises(ShapeError, match="dloss \\(5,\\)"):
        linear_cross_entropy_grad_p.bind(x, head, LABELS, torch.ones(5), **params)
