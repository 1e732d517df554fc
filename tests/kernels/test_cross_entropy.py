"""Cross-entropy's kernels against float64: torch's own loss is the judge."""

import math

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import _head_chunks, implementation
from mpar.kernels._cross_entropy import gradient_rows
from mpar.ops import PRIMITIVES

FORWARD, BACKWARD = implementation("cross_entropy", "triton"), implementation("cross_entropy_bwd", "triton")
STATISTICS = implementation("cross_entropy_stats", "triton")
LINEAR, LINEAR_BACKWARD = implementation("linear_cross_entropy", "triton"), implementation("linear_cross_entropy_bwd", "triton")
ONE_PASS = implementation("linear_cross_entropy_grad", "triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IGNORED = -100


def params(vocab_size, start=0, smoothing=0.0):
    return {"ignore_index": IGNORED, "vocab_size": vocab_size, "start": start, "label_smoothing": smoothing}


def make_labels(num_tokens, vocab_size):
    """Labels all over the vocabulary, every fourth ignored."""
    labels = torch.arange(num_tokens) * 7919 % vocab_size
    return torch.where(torch.arange(num_tokens) % 4 == 2, IGNORED, labels)


def losses(logits, labels, vocab_size, smoothing=0.0):
    """Loss of each token by torch, without padding columns."""
    kept = logits[:, :vocab_size]
    return torch.nn.functional.cross_entropy(kept, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")


def gradient(logits, labels, dloss, dlse, vocab_size, smoothing=0.0):
    """Gradient of `sum(loss * dloss + lse * dlse)` by autograd in float64."""
    logits = logits.double().requires_grad_()
    total = (losses(logits, labels, vocab_size, smoothing) * dloss.double()).sum()
    total = total + (torch.logsumexp(logits[:, :vocab_size], 1) * dlse.double()).sum()
    return torch.autograd.grad(total, logits)[0]


SIZES = [(5, 40, 40), (6, 41, 37), (7, 3, 3), (5, 2, 2), (3, 7, 2), (4, 17000, 16990), (3, 16387, 16387), (0, 40, 40)]
"""Tokens, columns, vocabulary: whole groups, ragged rows, rows shorter than a group, several blocks, padding, nothing."""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_float64(size, dtype, smoothing, make_tensor, device):
    """Loss, log-sum-exp and gradient agree with torch in float64; padding columns get none."""
    num_tokens, num_columns, vocab_size = size
    logits, labels = make_tensor((num_tokens, num_columns), dtype).mul(3), make_labels(num_tokens, vocab_size).to(device)
    dloss, dlse = (make_tensor((num_tokens,)) for _ in range(2))
    loss, lse = FORWARD(logits, labels, **params(vocab_size, 0, smoothing))
    wide = logits.double()
    testing.assert_close(loss, losses(wide, labels, vocab_size, smoothing), name="loss")
    testing.assert_close(lse, torch.logsumexp(wide[:, :vocab_size], 1), name="lse")
    dlogits = BACKWARD(logits, labels, lse, dloss, dlse, **params(vocab_size, 0, smoothing))
    testing.assert_close(dlogits, gradient(logits, labels, dloss, dlse, vocab_size, smoothing), name="dlogits")
    assert dlogits.dtype == dtype and not dlogits[:, vocab_size:].any()


@pytest.mark.parametrize("given", ["dloss", "dlse"])
def test_either_cotangent_may_be_missing(given, make_tensor, device):
    """A cotangent that is None counts as 0; ignored tokens pass on their lse's."""
    logits, labels, dy = make_tensor((6, 41)), make_labels(6, 41).to(device), make_tensor((6,))
    _, lse = FORWARD(logits, labels, **params(41))
    zero = torch.zeros_like(dy)
    pair = (dy, None) if given == "dloss" else (None, dy)
    expected = gradient(logits, labels, *((dy, zero) if given == "dloss" else (zero, dy)), 41)
    testing.assert_close(BACKWARD(logits, labels, lse, *pair, **params(41)), expected, name="dlogits")


def test_gradient_overwrites_the_logits(make_tensor, device):
    """In place, aligned or ragged, the gradient has the bits that it has elsewhere."""
    for num_columns in (3, 40, 41, 9001):
        logits, labels = make_tensor((5, num_columns), torch.bfloat16), make_labels(5, num_columns).to(device)
        dloss = make_tensor((5,))
        _, lse = FORWARD(logits, labels, **params(num_columns))
        expected = BACKWARD(logits, labels, lse, dloss, None, **params(num_columns))
        gradient_rows(logits, labels, lse, dloss, None, logits, **params(num_columns))
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("vocab_size", [100, 60])
def test_shards_combine_to_the_whole(vocab_size, num_shards, smoothing, z_loss, make_tensor, device):
    """Statistics of shards, even of padding alone, make the whole's loss; gradients with its lse make the whole's gradient."""
    logits, labels = make_tensor((7, 100)).mul(3), make_labels(7, vocab_size).to(device)
    dloss = make_tensor((7,))
    shards, width = [shard.contiguous() for shard in logits.chunk(num_shards, 1)], 100 // num_shards
    settings = [params(vocab_size, rank * width, smoothing) for rank in range(num_shards)]
    parts = [STATISTICS(shard, labels, **setting) for shard, setting in zip(shards, settings, strict=True)]
    lse = torch.logsumexp(torch.stack([part[0] for part in parts]), 0)
    ignored = labels == IGNORED
    loss = (lse - sum(part[1] for part in parts)).masked_fill(ignored, 0.0) + z_loss * lse.masked_fill(ignored, 0.0).square()
    wide = logits.double().requires_grad_()
    lse_wide = torch.logsumexp(wide[:, :vocab_size], 1).masked_fill(ignored, 0.0)
    expected = losses(wide, labels, vocab_size, smoothing) + z_loss * lse_wide.square()
    testing.assert_close(loss, expected, name="loss")
    dlse = (2 * z_loss * lse * dloss).masked_fill(ignored, 0.0)
    grads = [BACKWARD(shard, labels, lse, dloss, dlse, **setting) for shard, setting in zip(shards, settings, strict=True)]
    (whole,) = torch.autograd.grad((expected * dloss.double()).sum(), wide)
    testing.assert_close(torch.cat(grads, 1), whole, name="dlogits")


def test_a_shard_of_padding_has_no_statistics(make_tensor, device):
    """A shard behind the vocabulary gives lse -inf and target 0, not NaN, and gradient 0; also where its rows are ragged."""
    for num_columns in (16, 13):
        logits, labels = make_tensor((3, num_columns)), torch.tensor([0, 5, IGNORED]).to(device)
        lse, target = STATISTICS(logits, labels, **params(20, 32, 0.1))
        assert lse.tolist() == [-math.inf] * 3 and target.tolist() == [0.0] * 3
        ones = torch.ones(3, device=device)
        assert not BACKWARD(logits, labels, ones, ones, ones, **params(20, 32, 0.1)).any()


def test_one_column_is_certain(make_tensor, device):
    """A vocabulary of one token has loss 0 and gradient 0, beside padding too."""
    for num_columns in (1, 9):
        logits, labels, ones = (
            make_tensor((20, num_columns)),
            torch.zeros(20, dtype=torch.int32, device=device),
            torch.ones(20).to(device),
        )
        loss, lse = FORWARD(logits, labels, **params(1))
        assert not loss.any() and torch.equal(lse, logits[:, 0])
        assert not BACKWARD(logits, labels, lse, ones, None, **params(1)).any()


def test_all_ignored_is_zero(make_tensor, device):
    """Tokens without labels have loss 0 and gradient 0, even if ignore_index is a column."""
    logits, ones = make_tensor((3, 24)), torch.ones(3, device=device)
    for index in (IGNORED, 5, -1, 10**9):
        labels, setting = torch.full((3,), index, device=device), params(24, 0, 0.1) | {"ignore_index": index}
        loss, lse = FORWARD(logits, labels, **setting)
        assert loss.tolist() == [0.0] * 3
        assert STATISTICS(logits, labels, **setting)[1].tolist() == [0.0] * 3
        assert not BACKWARD(logits, labels, lse, ones, None, **setting).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_invalid_labels_make_nan(dtype, make_tensor, device):
    """A label that does not exist makes its token's loss and target NaN and reads nothing outside the row; others stay."""
    logits = make_tensor((4, 24))
    labels = torch.tensor([20, -1, 2**31 - 1 if dtype == torch.int32 else 10**12, 3], dtype=dtype, device=device)
    loss, lse = FORWARD(logits, labels, **params(20))
    assert loss.isnan().tolist() == [True, True, True, False] and lse.isfinite().all()
    assert STATISTICS(logits, labels, **params(20))[1].isnan().tolist() == [True, True, True, False]


def test_logits_far_apart_or_impossible(make_tensor, device):
    """Logits of 1e4, also as a common offset, and of -inf give torch's loss and gradient."""
    logits = make_tensor((8, 43))
    logits[0] *= 1e4
    logits[1] += 1e4
    logits[2, :20] = -torch.inf
    logits[3] = -1e30
    labels = torch.tensor([40, 1, 30, 7, 4, 4, 4, 4], device=device)
    loss, lse = FORWARD(logits, labels, **params(43))
    wide = logits.double()
    for row in range(8):
        testing.assert_close(loss[row], losses(wide, labels, 43)[row], name=f"loss {row}")
    testing.assert_close(lse, torch.logsumexp(wide, 1), name="lse")
    ones, zeros = torch.ones(8, device=device), torch.zeros(8, device=device)
    dlogits = BACKWARD(logits, labels, lse, ones, None, **params(43))
    # lse = 1e4 is known to 5e-4 in float32, and so are probabilities beside it; that of 1e30 to nothing
    expected = gradient(logits, labels, ones, zeros, 43)
    for row in (0, 1, 2, 4, 5, 6, 7):
        testing.assert_close(dlogits[row], expected[row], name=f"dlogits {row}", rtol=1e-3 if row == 1 else None)


def test_rows_that_cannot_be_are_nan(make_tensor, device):
    """Rows of -inf alone, with NaN, or with +inf give no finite loss."""
    logits = make_tensor((4, 43))
    logits[0], logits[1, 42], logits[2, 17] = -torch.inf, torch.nan, torch.inf
    loss, _ = FORWARD(logits, torch.full((4,), 3, device=device), **params(43))
    assert loss.isfinite().tolist() == [False, False, False, True]


def test_reads_strided_operands(make_tensor, device):
    """Transposed logits, every second label, and cotangents that are expanded scalars."""
    logits = make_tensor((41, 6)).T
    labels = make_labels(12, 41).to(device)[::2]
    one, zero = torch.ones((), device=device).expand(6), torch.zeros(6, device=device)
    loss, lse = FORWARD(logits, labels, **params(41))
    testing.assert_close(loss, losses(logits.double(), labels, 41), name="loss")
    dlogits = BACKWARD(logits, labels, lse, one, one, **params(41))
    testing.assert_close(dlogits, gradient(logits, labels, one, one, 41), name="dlogits")
    assert dlogits.is_contiguous() and not zero.any()


def test_leading_dims_and_views_off_alignment(make_tensor, device):
    """Batches keep their shape; logits that start at an odd address are read rightly."""
    flat = make_tensor((2 * 3 * 40 + 1,), torch.bfloat16)
    logits, labels = flat[1:].view(2, 3, 40), make_labels(6, 40).view(2, 3).to(device)
    loss, lse = FORWARD(logits, labels, **params(40))
    assert loss.shape == lse.shape == (2, 3)
    testing.assert_close(loss.flatten(), losses(logits.double().flatten(0, 1), labels.flatten(), 40), name="loss")


def test_offsets_beyond_int32(make_tensor, device):
    """A row behind element 2**31 is read where it is."""
    logits = torch.empty((3, (1 << 30) + 24), dtype=torch.bfloat16, device=device)  # pages that nobody touches do not exist
    logits[2, :100] = make_tensor((100,), torch.bfloat16)
    logits[:2, :100] = 0
    labels = torch.tensor([1, 2, 5], device=device)
    loss, _ = FORWARD(logits, labels, **params(100))
    testing.assert_close(loss, losses(logits[:, :100].double(), labels, 100), name="loss")


@pytest.mark.gpu
def test_gradient_beyond_int32(make_tensor, device):
    """A gradient behind element 2**31 is written where it belongs, and no row before it is touched twice."""
    num_columns = 8192
    num_rows = (1 << 31) // num_columns + 2
    logits = torch.zeros((num_rows, num_columns), dtype=torch.bfloat16, device=device)
    logits[-1] = make_tensor((num_columns,), torch.bfloat16)
    labels = torch.zeros(num_rows, dtype=torch.int64, device=device)
    _, lse = FORWARD(logits, labels, **params(num_columns))
    dlogits = BACKWARD(logits, labels, lse, torch.ones_like(lse), None, **params(num_columns))
    for rows in (slice(0, 2), slice(num_rows - 2, num_rows)):
        ones = torch.ones(2, device=device)
        testing.assert_close(dlogits[rows], gradient(logits[rows], labels[rows], ones, 0 * ones, num_columns), name="dlogits")


CHUNKED = [(10, 24, 37, 3), (10, 24, 37, 1000), (40, 6, 13, 7), (9, 5, 4, 2), (1, 8, 130, 1), (0, 5, 7, 2)]
"""Tokens, hidden size, columns, chunk: parts of tokens, one chunk, more tokens than columns, few columns, one token, none."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", CHUNKED, ids=str)
def test_linear_form_matches_float64(size, dtype, make_tensor, device):
    """The fused head's losses and gradients, in two passes and in one, agree with float64 through the whole product."""
    num_tokens, hidden, num_columns, chunk = size
    x, head = make_tensor((num_tokens, hidden), dtype), make_tensor((hidden, num_columns), dtype)
    vocab_size = max(num_columns - 2, 1)
    labels, setting = make_labels(num_tokens, vocab_size).to(device), params(vocab_size, 0, 0.1) | {"chunk": chunk}
    dloss, dlse = (make_tensor((num_tokens,)) for _ in range(2))
    wide = [operand.double().requires_grad_() for operand in (x, head)]
    logits = wide[0] @ wide[1]
    expected = losses(logits, labels, vocab_size, 0.1)
    expected_lse = torch.logsumexp(logits[:, :vocab_size], 1)
    rounding = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]  # of the logits
    loss, lse = LINEAR(x, head, labels, **setting)
    testing.assert_close(loss, expected, name="loss", rtol=rounding)
    testing.assert_close(lse, expected_lse, name="lse", rtol=rounding)
    total = (expected * dloss.double()).sum()
    gradients = torch.autograd.grad(total + (expected_lse * dlse.double()).sum(), wide, retain_graph=True)
    for actual, g, name in zip(
        LINEAR_BACKWARD(x, head, labels, lse, dloss, dlse, **setting), gradients, ("dx", "dhead"), strict=True
    ):
        testing.assert_close(actual, g, name=name)
    gradients = torch.autograd.grad(total, wide)
    one_loss, one_lse, *one = ONE_PASS(x, head, labels, dloss, **setting)
    testing.assert_close(one_loss, expected, name="loss in one pass", rtol=rounding)
    testing.assert_close(one_lse, expected_lse, name="lse in one pass", rtol=rounding)
    for actual, g, name in zip(one, gradients, ("dx in one pass", "dhead in one pass"), strict=True):
        testing.assert_close(actual, g, name=name)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_stats"])
def test_linear_form_is_the_reference(name, make_tensor, device):
    """A shard of the fused head, batched and with a transposed head, gives what the reference gives."""
    x, head = make_tensor((2, 5, 24)), make_tensor((30, 24)).T
    labels, setting = make_labels(10, 50).view(2, 5).to(device), params(50, 20, 0.1) | {"chunk": 4}
    expected = PRIMITIVES[name].impl(x, head, labels, **setting)
    for actual, wanted in zip(implementation(name, "triton")(x, head, labels, **setting), expected, strict=True):
        testing.assert_close(actual, wanted)


@pytest.mark.parametrize("num_tokens", [10, 60])
def test_linear_gradient_of_a_shard_is_the_reference(num_tokens, make_tensor, device):
    """Gradients of a vocabulary shard, whichever dim the chunks divide, are the reference's."""
    x, head = make_tensor((2, num_tokens // 2, 24)), make_tensor((30, 24)).T
    labels, setting = make_labels(num_tokens, 50).view(2, -1).to(device), params(50, 20, 0.1) | {"chunk": 4}
    lse, dloss, dlse = make_tensor((2, num_tokens // 2)) + 8, *(make_tensor((2, num_tokens // 2)) for _ in range(2))
    expected = PRIMITIVES["linear_cross_entropy_bwd"].impl(x, head, labels, lse, dloss, dlse, **setting)
    actual = LINEAR_BACKWARD(x, head, labels, lse, dloss, dlse, **setting)
    for got, wanted in zip(actual, expected, strict=True):
        testing.assert_close(got, wanted)
        assert got.is_contiguous()


@pytest.mark.parametrize("form", ["two passes", "one pass"])
@pytest.mark.parametrize("num_tokens", [16, 80])
def test_chunks_add_up_in_float32(num_tokens, form, make_tensor, device):
    """Sums over many chunks of bfloat16 are nearer to float64 than sums that are rounded to bfloat16 after every chunk."""
    hidden, num_columns, chunk = 16, 64, 4 if num_tokens > 64 else 1
    x, head = make_tensor((num_tokens, hidden), torch.bfloat16), make_tensor((hidden, num_columns), torch.bfloat16)
    labels, ones = make_labels(num_tokens, num_columns).to(device), torch.ones(num_tokens, device=device)
    logits, setting = x @ head, params(num_columns) | {"chunk": chunk}
    _, lse = FORWARD(logits, labels, **params(num_columns))
    dlogits = BACKWARD(logits, labels, lse, ones, None, **params(num_columns))
    exact = dlogits.double() @ head.double().T, x.double().T @ dlogits.double()
    rounded = torch.zeros_like(x), torch.zeros_like(head)
    for part in _head_chunks.backward_chunks(x, head, chunk)[1]:
        rounded[0].add_(dlogits[:, part] @ head[:, part].T)
    for first in range(0, num_tokens, chunk):
        rounded[1].add_(x[first : first + chunk].T @ dlogits[first : first + chunk])
    if form == "one pass":
        *_, dx, dhead = ONE_PASS(x, head, labels, ones, **setting)
        split = 1
    else:
        dx, dhead = LINEAR_BACKWARD(x, head, labels, lse, ones, None, **setting)
        split = int(num_tokens > num_columns)
    actual = (dx, dhead)[split]
    error, bad = testing.relative_error(actual, exact[split]), testing.relative_error(rounded[split], exact[split])
    assert error < 0.85 * bad and error < 3e-3, (error, bad)  # one rounding to bfloat16 is 2**-9


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_pass_agrees_with_two(smoothing, make_tensor, device):
    """The fused kernel's losses and gradients are those of the two kernels to a rounding, aligned and ragged."""
    for num_columns in (40, 41):
        x, head = make_tensor((7, 16), torch.bfloat16), make_tensor((16, num_columns), torch.bfloat16)
        labels, setting = make_labels(7, 40).to(device), params(40, 0, smoothing) | {"chunk": 7}
        dloss = make_tensor((7,))
        loss, lse = LINEAR(x, head, labels, **setting)
        expected = loss, lse, *LINEAR_BACKWARD(x, head, labels, lse, dloss, None, **setting)
        for actual, wanted in zip(ONE_PASS(x, head, labels, dloss, **setting), expected, strict=True):
            testing.assert_close(actual, wanted, rtol=1e-6 if actual.dtype == torch.float32 else 2e-3)


def test_chunks_keep_their_promises():
    """Chunks cover everything once, hold at most `chunk` tokens' logits, and at most the budget or 1024 tokens'."""
    for num_tokens in (0, 1, 1000, 8192, 33000):
        for num_columns in (16032, 50257, 128256):
            for chunk in (1, 1000, 1024, 100_000):
                x = torch.empty(num_tokens, 64, dtype=torch.bfloat16, device="meta")
                head = torch.empty(64, num_columns, dtype=torch.bfloat16, device="meta")
                for chunks in (_head_chunks.forward_chunks(x, head, chunk), _head_chunks.backward_chunks(x, head, chunk)):
                    for parts, size in zip(chunks, (num_tokens, num_columns), strict=True):
                        assert [i for part in parts for i in (part.start, part.stop)] == _edges(parts, size)
                    largest = max((p.stop - p.start for p in chunks[0]), default=0) * max(p.stop - p.start for p in chunks[1])
                    assert largest <= chunk * num_columns
                    assert 2 * largest <= max(_head_chunks.BUDGET, 2 * 1024 * num_columns)
                    assert min(map(len, chunks)) <= 1


def test_workspace_of_a_large_head():
    """8192 tokens, hidden size 4096, 128256 columns: what a call allocates beside its results, and what it avoids."""
    x, head = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8192, 4096), (4096, 128256)))
    logits, budget = 2 * 8192 * 128256, _head_chunks.BUDGET
    assert _head_chunks.forward_workspace(x, head, chunk=8192) <= budget
    assert _head_chunks.forward_workspace(x, head, chunk=256) == logits // 32
    # the sum over chunks is that of dx, a thirtieth of that of dhead
    assert 4 * x.numel() < _head_chunks.backward_workspace(x, head, None, None, chunk=8192) <= budget + 4 * x.numel()
    # in one pass it would be that of dhead, as large as all logits, which are then made at once
    assert _head_chunks.grad_workspace(x, head, None, None, chunk=8192) == logits
    assert _head_chunks.grad_workspace(x, head, None, None, chunk=1024) == logits // 8 + 4 * head.numel()


def _edges(parts, size):
    inner = [part.stop for part in parts[:-1]]
    return sorted([0, *inner, *inner, size]) if size else []


def test_refuses_float64(make_tensor):
    """Kernels compute in float32, so float64 is refused instead of rounded."""
    logits, labels = make_tensor((3, 8), torch.float64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(KernelError, match="take no torch\\.float64"):
        FORWARD(logits, labels, **params(8))
    with pytest.raises(KernelError, match="take no torch\\.float64"):
        LINEAR(logits, logits.T, labels, **params(3), chunk=2)
