"""Paged attention's kernels against float64: rows in pages, prompts and single tokens, parts, masks; bits that no row changes."""

import math

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import Kernels, _paged_attention, choose, implementation
from mpar.kernels._paged_attention_support import ALIGNED, MAX_SPLITS, paged_attention_workspace, split_length

KERNEL = implementation("paged_attention", "triton")
PAGE, ROWS, PAGES_PER_ROW = 16, 4, 24
TABLE = torch.randperm(ROWS * PAGES_PER_ROW, generator=torch.Generator().manual_seed(1)).view(1, ROWS, PAGES_PER_ROW)
TOKENS = [  # (row, position): long and short rows, padding, a piece of a prompt over the border of two parts, a row twice
    *((2, 300), (0, 17), (-1, 0), (1, 383), (3, 0)),
    *((0, position) for position in range(253, 258)),
    *((-1, 0), (2, 301)),
]
VARIANTS = ({}, {"window": 20, "sinks": True}, {"window": 300, "sinks": True, "soft_cap": 2.0, "scale": 0.3})


def operands_of(make_tensor, *, N=4, K=2, H=64, dtype=torch.float32, tokens=TOKENS, table=TABLE, sinks=False):
    """q, k, v, rows, positions, pages and perhaps sinks. What belongs to no row is NaN, as memory may be."""
    device = make_tensor((1,)).device
    rows_BT, positions_BT = torch.tensor([tokens]).unbind(-1)
    num_pages = ROWS * PAGES_PER_ROW + 2
    k, v = (make_tensor((1, num_pages * PAGE, K, H), dtype) for _ in range(2))
    for pool in (k, v):
        pool[:, -2 * PAGE :] = math.nan
    indices = (x.contiguous().to(device) for x in (rows_BT, positions_BT, table))
    return make_tensor((1, len(tokens), N, H), dtype), k, v, *indices, make_tensor((N,), dtype) if sinks else None


def call(operands, *, shard=False, window=None, scale=0.2, soft_cap=None, page_size=PAGE):
    return KERNEL(*operands, shard=shard, page_size=page_size, window=window, scale=scale, soft_cap=soft_cap)


def reference(q, k, v, rows, positions, pages, sinks, *, window=None, scale=0.2, soft_cap=None):
    """Token by token, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    group = q.shape[2] // k.shape[2]
    for t, (row, position) in enumerate(zip(rows[0].tolist(), positions[0].tolist(), strict=True)):
        if row < 0:
            continue
        seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1, device=q.device)
        places = pages[0, row][seen // PAGE] * PAGE + seen % PAGE
        keys, values = (pool[0, places].transpose(0, 1).repeat_interleave(group, 0) for pool in (k, v))
        scores = torch.einsum("nh,nmh->nm", q[0, t], keys) * scale
        scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
        more = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
        lse[0, t] = more.logsumexp(1)
        out[0, t] = torch.einsum("nm,nmh->nh", (scores - lse[0, t, :, None]).exp(), values)
    return out, lse


def check(operands, **how):
    results, expected = call(operands, **how), reference(*operands, **how)
    for name, actual, wanted in zip(("out", "lse"), results, expected, strict=True):
        testing.assert_close(actual, wanted, name=name)
    assert not results[0][operands[3] < 0].any() and (results[1][operands[3] < 0] == -math.inf).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_matches_float64(variant, make_tensor):
    """Tokens of long and short rows, of several parts and of one, in one call; padding gets zeros."""
    how = {key: value for key, value in variant.items() if key != "sinks"}
    operands = operands_of(make_tensor, sinks="sinks" in variant)
    assert split_length(operands[0], operands[1], TABLE, PAGE, how.get("window"))[1] == 2
    check(operands, **how)


HEADS = [(6, 2, 64, torch.bfloat16), (70, 1, 64, torch.float16), (2, 2, 128, torch.bfloat16), (2, 1, 256, torch.float16)]


@pytest.mark.parametrize(("N", "K", "H", "dtype"), HEADS, ids=str)
def test_heads_and_dtypes(N, K, H, dtype, make_tensor):
    """Groups that are no power of two and that need two programs, and the other sizes of heads."""
    check(operands_of(make_tensor, N=N, K=K, H=H, dtype=dtype, tokens=[(1, 270), (1, 271), (0, 5)]))


def test_latents_are_keys_and_values(make_tensor):
    """One pool of 576 features is both; it is loaded as 512 and 64."""
    q, k, _, *others = operands_of(make_tensor, N=3, K=1, H=576, dtype=torch.bfloat16, tokens=[(1, 300), (0, 5)])
    check((q, k, k, *others))


def test_one_part(make_tensor, monkeypatch):
    """Where rows are not divided, the first kernel gives the results itself, with sinks."""
    monkeypatch.setattr(_paged_attention, "split_length", lambda *_: (ROWS * PAGES_PER_ROW * PAGE, 1))
    check(operands_of(make_tensor, sinks=True))


def test_a_token_has_the_same_bits_whatever_is_beside_it(make_tensor):
    """Alone and at another place, or in a piece of its prompt and beside other rows: the same bits."""
    tokens = [(2, 300), (1, 383), *((0, position) for position in (254, 255, 256)), (-1, 0)]
    q, k, v, rows, positions, pages, _ = operands_of(make_tensor, N=2, K=1, dtype=torch.bfloat16, tokens=tokens)
    out, lse = call((q, k, v, rows, positions, pages, None), window=300)
    for t, place in ((1, 4), (2, 2), (4, 3)):
        alone, at, moved = torch.full_like(rows, -1), positions.clone(), q.clone()
        alone[0, place], at[0, place], moved[0, place] = rows[0, t], positions[0, t], q[0, t]
        again, again_lse = call((moved, k, v, alone, at, pages, None), window=300)
        assert torch.equal(again[0, place], out[0, t]) and torch.equal(again_lse[0, place], lse[0, t])


def test_shards_see_the_pages_that_are_there(make_tensor):
    """Two shards of the pools, put together by their log-sum-exps, are the whole; a token without a page has -inf."""
    q, k, v, rows, positions, pages, _ = operands_of(make_tensor, N=2, K=1, tokens=[(2, 300), (-1, 0), (1, 380), (3, 0)])
    half = k.shape[1] // PAGE // 2
    parts = []
    for first in (0, half):
        pools = (pool[:, first * PAGE : (first + half) * PAGE] for pool in (k, v))
        parts.append(call((q, *pools, rows, positions, pages - first, None), shard=True))
    expected, expected_lse = reference(q, k, v, rows, positions, pages, None)
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    assert any((lse_part == -math.inf)[0, 3].all() for _, lse_part in parts), "each shard has the page of row 3"
    level = lse.masked_fill(lse == -math.inf, 0.0)
    out = sum(part * (lse_part - level).exp()[..., None] for part, lse_part in parts)
    testing.assert_close(out, expected, name="out")
    testing.assert_close(lse, expected_lse, name="lse")


def test_groups_and_pools_that_are_not_contiguous(make_tensor):
    """Two groups with pools and pages of their own; pools that are parts of others are copied only if they must be."""
    q, k, v, rows, positions, pages, _ = operands_of(make_tensor, tokens=[(1, 270), (0, 5)])
    both = torch.cat([k, v]), torch.cat([v, k])
    out, _ = call((torch.cat([q, q]), *both, rows.expand(2, -1), positions.expand(2, -1), pages.expand(2, -1, -1), None))
    for group, pools in enumerate(((k, v), (v, k))):
        assert torch.equal(out[group], call((q, *pools, rows, positions, pages, None))[0][0])
    turned = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (k, v)]
    assert torch.equal(call((q, *turned, rows, positions, pages, None))[0][0], out[0])
    part = [torch.cat([pool, pool], 2)[:, :, : pool.shape[2]] for pool in (k, v)]
    assert _paged_attention._loadable(*part)[0] is part[0]


@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize("T", [1, 16, 512])
def test_parts_cover_rows(T, window):
    """Parts are whole tiles, not too many to be put together, cover a row, and are few where there are many tokens; their results
    are the workspace."""
    for length in (16, 640, 8192, 131072):
        q, k = torch.empty(1, T, 32, 64, device="meta"), torch.empty(1, 64, 8, 64, device="meta")
        pages = torch.empty(1, 4, length // 16, device="meta")
        split, number = split_length(q, k, pages, 16, window)
        bytes_of_parts = 0 if number == 1 else 4 * T * 32 * number * (64 + 1)
        assert paged_attention_workspace(q, k, k, pages, pages, pages, None, page_size=16, window=window) == bytes_of_parts
        assert split % ALIGNED == 0 and number <= MAX_SPLITS and (number - 1) * split < length <= number * split
        assert T < 512 or window or length > MAX_SPLITS * 256 or number == 1


def test_nothing_to_attend_to(make_tensor):
    """No tokens, and no pages."""
    q, k, v, rows, positions, pages, _ = operands_of(make_tensor, tokens=[(-1, 0)])
    assert call((q[:, :0], k, v, rows[:, :0], positions[:, :0], pages, None))[0].numel() == 0
    out, lse = call((q, k, v, rows, positions, pages[..., :0], None))
    assert not out.any() and (lse == -math.inf).all()


def test_what_is_not_supported_is_said(make_tensor):
    """The choice says why it takes the reference, and the kernel refuses the call in the same words."""
    params = {"shard": False, "page_size": PAGE, "window": None, "scale": 0.2, "soft_cap": None}
    for H, dtype, scale, words in [
        (48, torch.bfloat16, 0.2, "head size 48: kernels have 64, 128, 256, 576"),
        (64, torch.float64, 0.2, "take no torch.float64"),
        (576, torch.float32, 0.2, "head size 576 in float32"),
        (64, torch.bfloat16, -1.0, "scale -1.0"),
    ]:
        operands = operands_of(make_tensor, H=H, dtype=dtype, tokens=[(0, 3)])
        name, why = choose(Kernels("auto", "sm_90"), "paged_attention", operands, params | {"scale": scale})
        assert name == "reference" and words in why
        with pytest.raises(KernelError, match=words):
            call(operands, scale=scale)
    assert choose(Kernels("auto", "sm_90"), "paged_attention", operands_of(make_tensor), params) == ("triton", "")
