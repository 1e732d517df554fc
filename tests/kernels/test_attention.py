"""Attention's kernels against float64: masks, heads, lengths, caps, sinks, gradients of out and lse; rows that see nothing."""

import math

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import _attention, _attention_support, _launch, implementation
from mpar.kernels.offline import Tuning

FORWARD, BACKWARD = implementation("attention", "triton"), implementation("attention_bwd", "triton")
SHARP = torch.float32 if _launch.interpreting() else torch.bfloat16
"""In the interpreter kernels compute in float32 too, where an error of logic cannot hide in rounding; on a GPU they refuse it."""
DTYPES = list(dict.fromkeys([SHARP, torch.float16, torch.bfloat16]))
SMALL = {"attention_fwd": (32, 32), "attention_dkdv": (32, 32), "attention_dq": (32, 32)}
"""Tiles for masks: small ones, so that few rows have tiles that are hidden, seen in part, and seen wholly."""


@pytest.fixture(autouse=True)
def sharp_is_supported(monkeypatch):
    """float32 passes the check where it is interpreted."""
    monkeypatch.setattr(_attention_support, "DTYPES", DTYPES)


@pytest.fixture
def small_tiles(monkeypatch):
    """Kernels run with small tiles, and the ranges of tiles are found in small steps."""
    tuned = _attention.tuned

    def small(kernel, x, size=None):
        if kernel == "attention_ranges":
            return Tuning({"BLOCK": 32}, 4)
        if kernel not in SMALL:
            return tuned(kernel, x, size)
        return Tuning(dict(zip(("BLOCK_M", "BLOCK_N"), SMALL[kernel], strict=True)), 4)

    monkeypatch.setattr(_attention, "tuned", small)


def seen_pairs(S, M, causal=True, window=None, q_order=None, k_order=None, q_documents=None, k_documents=None):
    """Which query sees which key, (B or 1, S, M)."""
    i = torch.arange(S) if q_order is None else q_order.cpu().long()
    j = torch.arange(M) if k_order is None else k_order.cpu().long()
    distance = i[:, None] - j[None, :]
    seen = torch.ones(1, S, M, dtype=torch.bool)
    seen = seen & (distance >= 0) if causal else seen
    seen = seen & (distance < window) if window is not None else seen
    if q_documents is not None:
        left, right = q_documents.cpu().long()[:, :, None], k_documents.cpu().long()[:, None, :]
        seen = seen & (left == right) & (left != -1)
    return seen


def reference(q, k, v, sinks=None, *, scale=None, soft_cap=None, **mask):
    """Softmax over the keys that are seen and the sink, in float64: weights are exponentials over their sum."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bsnh,bmnh->bnsm", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = seen_pairs(q.shape[1], k.shape[1], **mask).to(q.device)[:, None]
    weights = torch.where(seen, scores.masked_fill(~seen, 0.0).exp(), 0.0)
    total = weights.sum(-1) + (0.0 if sinks is None else sinks.exp()[None, :, None])
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    out = torch.einsum("bnsm,bmnh->bsnh", weights / total[..., None], v)
    return out, total.log().masked_fill(blind, -math.inf).transpose(1, 2)


def call(q, k, v, sinks=None, *, scale=None, soft_cap=None, causal=True, window=None, **masks):
    """What kernels are called with: operands in order, parameters."""
    names = ("q_order", "k_order", "q_documents", "k_documents")
    params = {"causal": causal, "window": window, "scale": q.shape[3] ** -0.5 if scale is None else scale, "soft_cap": soft_cap}
    return (q, k, v, *(masks.get(name) for name in names), sinks), params


def check(make_tensor, operands, *, lse_cotangent=True, rtol=None, **how):
    """Output, lse and all gradients agree with float64; operands are q, k, v and perhaps sinks.

    rtol: of what is made of weights: the output and gradients; None: by dtype.
    """
    arguments, params = call(*operands, **how)
    out, lse = FORWARD(*arguments, **params)
    leaves = [x.detach().double().requires_grad_() for x in operands]
    expected_out, expected_lse = reference(*leaves, **how)
    testing.assert_close(out, expected_out, name="out", rtol=rtol)
    testing.assert_close(lse, expected_lse, name="lse")
    dout, dlse = make_tensor(out.shape, out.dtype), make_tensor(lse.shape) if lse_cotangent else None
    value = (expected_out * dout).sum()
    if dlse is not None:
        value = value + (expected_lse.masked_fill(expected_lse == -math.inf, 0.0) * dlse).sum()
    expected = torch.autograd.grad(value, leaves)
    gradients = BACKWARD(*arguments, out, lse, dout, dlse, **params)
    assert all(x.is_contiguous() for x in (out, lse, *gradients))
    for name, actual, wanted in zip(("dq", "dk", "dv", "dsinks"), gradients, expected, strict=False):
        testing.assert_close(actual, wanted, name=name, rtol=rtol)
    return out, lse, gradients


def operands_of(make_tensor, B=1, S=70, M=70, N=1, K=1, H=64, V=None, dtype=SHARP, sinks=False):
    """q, k, v and perhaps sinks."""
    shapes = (B, S, N, H), (B, M, K, H), (B, M, K, H if V is None else V)
    return [make_tensor(shape, dtype) for shape in shapes] + ([make_tensor((N,), dtype)] if sinks else [])


ZIGZAG = torch.cat([torch.arange(0, 35), torch.arange(105, 140)])
SHUFFLED = torch.randperm(70, generator=torch.Generator().manual_seed(1))


def _documents(*lengths):
    """Ids in order for these lengths; a negative length is padding, 0 an empty document."""
    return torch.cat([torch.full((abs(n),), -1 if n < 0 else i, dtype=torch.int32) for i, n in enumerate(lengths)])


PACKED = torch.stack([_documents(0, 40, 0, 1, 13, 16, 0), _documents(-5, 30, 25, -10)])
OTHERS = torch.stack([_documents(0, 5, 0, 50, 15), _documents(0, 10, 40, 20)])
BOTH = {"q_documents": PACKED, "k_documents": PACKED}
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "window without causal": {"window": 20, "causal": False},
    "window beyond all": {"window": 2**40},
    "zigzag": {"q_order": ZIGZAG, "k_order": ZIGZAG},
    "zigzag in a window": {"q_order": ZIGZAG.int(), "k_order": ZIGZAG, "window": 80},
    "shuffled": {"q_order": SHUFFLED, "k_order": SHUFFLED.int()},
    "later keys": {"k_order": torch.arange(30, 100)},
    "keys that nobody sees": {"q_order": torch.arange(70), "k_order": torch.arange(70, 140)},
    "documents": BOTH,
    "documents, full": {**BOTH, "causal": False},
    "documents, window": {**BOTH, "window": 9},
    "documents of keys differ": {"q_documents": PACKED, "k_documents": OTHERS, "causal": False},
    "padding alone": {"q_documents": torch.full((2, 70), -1), "k_documents": torch.full((2, 70), -1)},
    "documents and zigzag": {**BOTH, "q_order": ZIGZAG, "k_order": ZIGZAG},
    "soft cap": {"soft_cap": 0.8},
    "everything": {**BOTH, "q_order": SHUFFLED, "k_order": SHUFFLED, "window": 50, "soft_cap": 2.0, "scale": 0.2},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask, make_tensor, device, small_tiles):
    """Every kind of mask: values and gradients; rows that see nothing give 0, -inf and 0."""
    mask = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in mask.items()}
    check(make_tensor, operands_of(make_tensor, B=2 if "q_documents" in mask else 1), **mask)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "everything"])
def test_sinks(name, make_tensor, device, small_tiles):
    """A sink counts in the sum of a row and has a gradient; it is all that a row has which sees nothing."""
    mask = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in MASKS[name].items()}
    check(make_tensor, operands_of(make_tensor, B=2, N=2, sinks=True), **mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "V"), [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_head_sizes_with_tiles_of_the_table(arch, H, V, dtype, make_tensor, monkeypatch):
    """Every size class as it is launched, with descriptors and with pointers; lengths are no multiple of a tile."""
    monkeypatch.setattr(_launch, "INTERPRETED_ARCH", arch)
    check(make_tensor, operands_of(make_tensor, S=150, M=150, N=1, H=H, V=V, dtype=dtype))


@pytest.mark.parametrize(("H", "V"), [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_documents_and_a_cap_with_tiles_of_the_table(arch, H, V, make_tensor, device, monkeypatch):
    """Classes of their own, where the table has them; a document ends within a tile."""
    monkeypatch.setattr(_launch, "INTERPRETED_ARCH", arch)
    ids = _documents(40, 0, 61, -9, 40)[None].to(device)
    check(make_tensor, operands_of(make_tensor, S=150, M=150, H=H, V=V), q_documents=ids, k_documents=ids, soft_cap=2.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("N", "K"), [(2, 2), (4, 2), (3, 1)], ids=str)
def test_groups_of_heads(N, K, causal, make_tensor, small_tiles):
    """Query head n reads kv head n // (N / K), and the gradients of k and v are sums over the group."""
    check(make_tensor, operands_of(make_tensor, S=50, M=50, N=N, K=K), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{"window": 100, "soft_cap": 1.5}, {"causal": False, "q_order": torch.arange(200)}], ids=str)
def test_narrow_dtypes(how, dtype, make_tensor, device):
    """Masks, caps and sinks with tiles of the table and operands that are rounded."""
    how = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    check(make_tensor, operands_of(make_tensor, S=200, M=200, dtype=dtype, sinks=True), **how)


@pytest.mark.parametrize(("S", "M"), [(1, 70), (33, 90), (90, 33)], ids=str)
@pytest.mark.parametrize("how", [{}, {"causal": False}, {"window": 11}, {"window": 11, "causal": False}], ids=str)
def test_lengths_differ(S, M, how, make_tensor, small_tiles):
    """Queries and keys in different numbers, with tails on either side."""
    check(make_tensor, operands_of(make_tensor, S=S, M=M), **how)


def test_without_a_cotangent_of_lse(make_tensor, small_tiles):
    """Where only the output is used, its cotangent may be a view of one number."""
    operands = operands_of(make_tensor)
    check(make_tensor, operands, lse_cotangent=False)
    arguments, params = call(*operands)
    out, lse = FORWARD(*arguments, **params)
    ones = torch.ones((), device=out.device).expand(out.shape)
    for actual, expected in zip(
        BACKWARD(*arguments, out, lse, ones, None, **params),
        BACKWARD(*arguments, out, lse, ones.contiguous(), None, **params),
        strict=True,
    ):
        assert torch.equal(actual, expected)
    assert not any(x.any() for x in BACKWARD(*arguments, out, lse, None, None, **params))


@pytest.mark.parametrize("dtype", [torch.float16, SHARP], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_slices_of_a_packed_projection(arch, dtype, make_tensor, small_tiles, monkeypatch):
    """q, k and v may be slices of one tensor, or have rows that no descriptor can load."""
    monkeypatch.setattr(_launch, "INTERPRETED_ARCH", arch)
    packed = make_tensor((1, 40, 4, 64), dtype)
    check(make_tensor, [packed[:, :, :2], packed[:, :, 2:3], packed[:, :, 3:]])
    shifted = make_tensor((1, 40, 4, 65), dtype)[..., 1:]
    check(make_tensor, [shifted[:, :, :2], shifted[:, :, 2:3], shifted[:, :, 3:]])
    turned = make_tensor((64, 4, 40, 1), dtype).permute(3, 2, 1, 0)
    check(make_tensor, [turned[:, :, :2], turned[:, :, 2:3], turned[:, :, 3:]])


def test_blind_rows_ignore_their_cotangent_of_lse(make_tensor, device, small_tiles):
    """A merge may make NaN of lse -inf: gradients of a row that sees nothing are 0 all the same."""
    operands = operands_of(make_tensor, B=2)
    arguments, params = call(*operands, q_documents=PACKED.to(device), k_documents=PACKED.to(device))
    out, lse = FORWARD(*arguments, **params)
    dlse = torch.where(lse == -math.inf, math.nan, 1.0)
    dq, dk, dv, _ = BACKWARD(*arguments, out, lse, torch.ones_like(out), dlse, **params)
    assert all(x.isfinite().all() for x in (dq, dk, dv)) and not dq[1, :5].any() and not dk[1, :5].any()


def test_large_scores(make_tensor, small_tiles):
    """Exponentials of +-400 would overflow float32: the maximum is taken off, whichever tile it is in.

    A score is a sum of H products. In float32 (unit roundoff u = 2^-24) its error is about sqrt(H) u of the size of its partial
    sums, in whatever order a machine adds them (Higham and Mary 2019: roundings as independent); these are at most about as large
    as the largest score. A weight is exp(score - lse), and both may be off by that: relatively a weight is off by
    2 sqrt(H) u |score|, here 16 * 400 u = 4e-4, which is the condition of the problem and no fault of a kernel. The output and
    the gradients are linear in weights. The lse itself is a score, relatively as exact as ever.
    """
    q, k, v = operands_of(make_tensor)
    q, k = q * 10, k * 10
    H = q.shape[3]
    largest = float((torch.einsum("bsnh,bmnh->bnsm", q.double(), k.double()) * H**-0.5).abs().max())
    assert largest > math.log(torch.finfo(torch.float32).max)
    check(make_tensor, [q, k, v], rtol=max(testing.TOLERANCES[q.dtype], 2 * math.sqrt(H) * 2**-24 * largest))


@pytest.mark.parametrize("mask", [{}, BOTH, {"q_order": ZIGZAG, "k_order": ZIGZAG}], ids=["causal", "documents", "zigzag"])
def test_same_bits_every_time(mask, make_tensor, device):
    """Nothing depends on the order of programs: two calls give the same bits."""
    mask = {name: value.to(device) for name, value in mask.items()}
    arguments, params = call(*operands_of(make_tensor, B=2, N=2, dtype=torch.bfloat16, sinks=True), **mask)
    results = [FORWARD(*arguments, **params) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    dout, dlse = make_tensor(results[0][0].shape, torch.bfloat16), make_tensor(results[0][1].shape)
    gradients = [BACKWARD(*arguments, *results[0], dout, dlse, **params) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_no_keys_or_no_queries(make_tensor):
    """Zero keys make every row blind, so that only sinks are left; zero queries give empty results and gradients 0."""
    for S, M in ((0, 5), (5, 0)):
        for sinks in (False, True):
            arguments, params = call(*operands_of(make_tensor, S=S, M=M, sinks=sinks))
            out, lse = FORWARD(*arguments, **params)
            level = arguments[-1] if sinks else torch.full((1,), -math.inf, device=out.device)
            assert out.shape == (1, S, 1, 64) and not out.any() and torch.equal(lse, level.expand(1, S, 1))
            gradients = BACKWARD(*arguments, out, lse, torch.ones_like(out), torch.ones_like(lse), **params)
            assert [x.shape for x in gradients[:3]] == [x.shape for x in arguments[:3]]
            assert not any(x.any() for x in gradients[:3]) and gradients[3].tolist() == ([S] if sinks else [])


def test_batch_rows_2_31_elements_apart(make_tensor, device, small_tiles):
    """Offsets of operands are 64 bits wide."""
    apart = 2**31 + 64
    memory = torch.empty(apart + 8 * 5120, dtype=torch.bfloat16, device=device)  # of which pages are made where they are touched
    views = [memory[i * 10240 :].as_strided((2, 80, 1, 64), (apart, 128, 64, 1)) for i in range(4)]
    views = [view.copy_(make_tensor((2, 80, 1, 64), torch.bfloat16)) for view in views]
    near = [view.contiguous() for view in views]
    arguments, params = call(*views[:3])
    out, lse = FORWARD(*arguments, **params)
    gradients = BACKWARD(*arguments, out, lse, views[3], None, **params)
    arguments, params = call(*near[:3])
    expected = FORWARD(*arguments, **params)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for actual, wanted in zip(gradients, BACKWARD(*arguments, *expected, near[3], None, **params), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "full", "window", "documents", "zigzag"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "V"), [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_production_tiles(H, V, dtype, mask, make_tensor, device):
    """What the compiler makes of every entry of the table, over many tiles, with caps and sinks on and off."""
    S = 1500
    order = torch.cat([torch.arange(0, 750), torch.arange(2250, 3000)]).to(device)
    ids = torch.stack([_documents(700, 0, 300, 500), _documents(-100, 128, 1172, -100)]).to(device)
    how = {"full": {"causal": False}, "window": {"window": 300}, "zigzag": {"q_order": order, "k_order": order}}
    how |= {"documents": {"q_documents": ids, "k_documents": ids}}
    operands = operands_of(make_tensor, B=2, S=S, M=S, N=4, K=2, H=H, V=V, dtype=dtype, sinks=True)
    check(make_tensor, operands[:3], **how.get(mask, {}))
    check(make_tensor, operands, soft_cap=2.0, **how.get(mask, {}))


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale", "message"),
    [
        ((96, 96), torch.bfloat16, 0.1, "head sizes 96 of q and 96 of v: kernels have 64 and 64, 128 and 128"),
        ((64, 128), torch.bfloat16, 0.1, "head sizes 64 of q and 128 of v"),
        ((64, 64), torch.float32, 0.1, "torch.float32: kernels take torch.float16 and torch.bfloat16"),
        ((64, 64), torch.bfloat16, -1.0, "scale -1.0"),
    ],
    ids=str,
)
def test_what_kernels_do_not_support_is_said(sizes, dtype, scale, message, make_tensor, monkeypatch):
    """Head sizes, dtypes and scales without a kernel are refused in words."""
    monkeypatch.undo()
    arguments, params = call(*operands_of(make_tensor, H=sizes[0], V=sizes[1], dtype=dtype), scale=scale)
    with pytest.raises(KernelError, match=message):
        FORWARD(*arguments, **params)
