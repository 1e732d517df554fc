"""Paged attention and the writes into its pages: against the plain formula, on simulated ranks, and what is refused."""

import pytest
import torch

from mpar import check, ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops import PRIMITIVES

SIZE, N, K, H = 4, 4, 2, 6
ROWS = torch.tensor([[0, 0, 0, 2, -1, 1, 2]])  # a chunk of row 0, single tokens of rows 2 (two runs) and 1, padding
POSITIONS = torch.tensor([[5, 6, 7, 0, 3, 11, 1]])
PAGES = torch.tensor([[[3, 1, 0], [5, 2, 7], [6, 0, 0]]])
VARIANTS = ({}, {"window": 3}, {"soft_cap": 2.0}, {"sinks": True}, {"scale": 0.1, "window": 6, "sinks": True, "soft_cap": 1.5})


def _expected(q, k, v, sinks, *, window=None, soft_cap=None, scale=H**-0.5):
    """Token by token and head by head, in the words of the docstring."""
    out = torch.zeros_like(q)
    for t, (row, position) in enumerate(zip(ROWS[0].tolist(), POSITIONS[0].tolist(), strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        places = [int(PAGES[0, row, p // SIZE]) * SIZE + p % SIZE for p in range(first, position + 1)]
        for head in range(N if row >= 0 else 0):
            scores = k[0, places, head // (N // K)] @ q[0, t, head] * scale
            scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
            scores = scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])
            out[0, t, head] = scores.softmax(0)[: len(places)] @ v[0, places, head // (N // K)]
    return out


def _operands(make_tensor, dtype, *, sinks):
    q, k, v = make_tensor((1, 7, N, H), dtype), make_tensor((1, 8 * SIZE, K, H), dtype), make_tensor((1, 8 * SIZE, K, H), dtype)
    return q, k, v, make_tensor((N,), dtype) if sinks else None


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_matches_the_formula(variant, dtype, make_tensor):
    """Chunks, single tokens and padding in one call, with windows, caps and sinks; padding gives zeros."""
    how = {key: value for key, value in variant.items() if key != "sinks"}
    q, k, v, sinks = _operands(make_tensor, dtype, sinks="sinks" in variant)
    out = ops.paged_attention(q, k, v, ROWS, POSITIONS, PAGES, page_size=SIZE, sinks=sinks, **how)
    wide = (x if x is None else x.double() for x in (q, k, v, sinks))
    testing.assert_close(out, _expected(*wide, **how))


def test_a_token_alone_has_the_same_bits(make_tensor):
    """What a token gets does not depend on the other rows of the step."""
    q, k, v, _ = _operands(make_tensor, torch.float32, sinks=False)
    together = ops.paged_attention(q, k, v, ROWS, POSITIONS, PAGES, page_size=SIZE)
    for part in (slice(0, 3), slice(3, 4), slice(5, 6)):
        alone = torch.full_like(ROWS, -1)
        alone[0, part] = ROWS[0, part]
        out = ops.paged_attention(q, k, v, alone, POSITIONS, PAGES, page_size=SIZE)
        assert torch.equal(out[0, part], together[0, part])


def test_sharding_rules_hold(make_tensor):
    """Groups, tokens, heads and pages of attention, groups, heads and places of writes may be sharded: ranks give the same."""
    B, T, rows = 4, 4, torch.arange(4).expand(4, 4)
    q, k, v = make_tensor((B, T, 8, 4), torch.float64), *(make_tensor((B, 16, 4, 4), torch.float64) for _ in range(2))
    pages, positions = torch.randint(4, (B, T, 4)), torch.randint(16, (B, T))
    params = {"shard": False, "page_size": 4, "window": None, "scale": 0.5, "soft_cap": None}
    operands = (q, k, v, rows, positions, pages, make_tensor((8,), torch.float64))
    assert set("btkp") <= set(check(PRIMITIVES["paged_attention"], operands, params))
    places = torch.stack([torch.randperm(16)[:T] for _ in range(B)])
    for name in ("write_rows", "write_rows_over"):
        operands = (k, make_tensor((B, T, 4, 4), torch.float64), places)
        assert set("bkhp") <= set(check(PRIMITIVES[name], operands, {"shard": False}))


def test_writes_rows(make_tensor):
    """Each row stands at its place, all others are as before; the op itself leaves its operand as it is."""
    pool, rows, places = make_tensor((2, 8, K, H)), make_tensor((2, 3, K, H)), torch.tensor([[6, 0, 3], [1, 7, 2]])
    before, new = pool.clone(), ops.write_rows(pool, rows, places)
    assert torch.equal(pool, before)
    for group in range(2):
        assert torch.equal(new[group, places[group]], rows[group])
        others = [p for p in range(8) if p not in places[group].tolist()]
        assert torch.equal(new[group, others], pool[group, others])


def test_what_is_refused(make_tensor):
    """Operands that do not fit each other, with all problems; other dtypes; windows and caps that are not positive."""
    q, k, v, _ = _operands(make_tensor, torch.float32, sinks=False)
    with pytest.raises(ShapeError, match=r"no whole number of pages of 5(.|\n)*rows is \(1, 6\), must be \(1, 7\)"):
        ops.paged_attention(q, k, v, ROWS[:, 1:], POSITIONS, PAGES, page_size=5)
    with pytest.raises(DtypeError, match=r"must be int64, not torch\.int32"):
        ops.paged_attention(q, k, v, ROWS.int(), POSITIONS, PAGES, page_size=SIZE)
    with pytest.raises(ConfigError, match="window=0"):
        ops.paged_attention(q, k, v, ROWS, POSITIONS, PAGES, page_size=SIZE, window=0)
    with pytest.raises(ShapeError, match="places must be"):
        ops.write_rows(k, q[:, :, :K], ROWS[:, 1:])
    with pytest.raises(DtypeError, match="places must be int64"):
        ops.write_rows(k, q[:, :, :K], ROWS.int())


def test_positions_in_no_page(make_tensor):
    """Of a token alone and of a long prompt, which is computed otherwise."""
    for count in (2, 100):
        q, k, v = make_tensor((1, count, 2, 16), torch.float32), *(make_tensor((1, 128, 2, 16), torch.float32) for _ in range(2))
        rows, pages = torch.zeros(1, count, dtype=torch.int64), torch.arange(4)[None, None]
        positions = torch.arange(60, 60 + count)[None]
        ops.paged_attention(q, k, v, rows, positions.clamp(max=63), pages, page_size=16)
        with pytest.raises(IndexError, match=r"position \d+ of row 0 is in no page"):
            ops.paged_attention(q, k, v, rows, positions + 4, pages, page_size=16)
