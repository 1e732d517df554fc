"""Paged attention of few tokens in C++: against the meaning, of a token alone and among others, and what it leaves to torch."""

import pytest
import torch

from mpar.ops import PRIMITIVES
from mpar.ops.sequence._few_tokens import few_tokens
from mpar.testing import TOLERANCES, assert_close, relative_error
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels

PAGE, ROWS, LONGEST = 4, 3, 5
VARIANTS = ({}, {"window": 3}, {"soft_cap": 2.0}, {"sinks": True}, {"window": 6, "sinks": True, "soft_cap": 1.5}, {"shard": True})
SHAPES = [(8, 4, 32), (14, 2, 64), (2, 2, 128), (9, 1, 48), (3, 3, 16)]
"""Heads, heads of keys, and their size: that of vectors in registers or not, with blocks that are full or not."""


def operands(heads, kv_heads, size, dtype, *, sinks=False, tokens=7, groups=2):
    """q, k, v, rows, positions, pages, sinks: tokens of several rows, with padding; no two pages of a group are one."""
    draw = torch.Generator().manual_seed(7)

    def make(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    count = ROWS * LONGEST
    q = make(groups, tokens, heads + 1, size)[:, :, 1:]  # a part of a wider tensor, as a joined product gives it
    k, v = make(groups, count * PAGE, kv_heads, size), make(groups, count * PAGE, kv_heads, size)
    rows = torch.randint(-1, ROWS, (groups, tokens), generator=draw)
    positions = torch.randint(0, LONGEST * PAGE, (groups, tokens), generator=draw)
    pages = torch.stack([torch.randperm(count, generator=draw).view(ROWS, LONGEST) for _ in range(groups)])
    return [q, k, v, rows, positions, pages, make(heads) if sinks else None]


def parameters(window=None, soft_cap=None, shard=False, **_):
    """The parameters of a call."""
    return {"shard": shard, "page_size": PAGE, "window": window, "scale": 0.3, "soft_cap": soft_cap}


def meaning(given, **params):
    """What the primitive means, by torch: in float64, which C++ does not compute."""
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    return PRIMITIVES["paged_attention"].meaning(*wide, **params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_matches_the_meaning(variant, shape, dtype):
    """Results and log-sum-exps, with windows, caps, sinks, and pages that other ranks have; nothing for tokens of padding."""
    given, params = operands(*shape, dtype, sinks="sinks" in variant), parameters(**variant)
    if "shard" in variant:
        given[5] -= 4
    out, lse = few_tokens(*given, **params)
    expected, expected_lse = meaning(given, **params)
    assert (out.shape, out.dtype, lse.dtype) == (given[0].shape, dtype, torch.float32)
    assert relative_error(out, expected) <= TOLERANCES[dtype]
    assert_close(lse, expected_lse.float())


def test_a_token_alone_has_the_same_bits():
    """What a token gets depends on no other one of the call."""
    given, run = operands(14, 2, 64, torch.float32), few_tokens
    together = run(*given, **parameters())
    for token in range(7):
        alone = list(given)
        alone[3] = torch.full_like(given[3], -1)
        alone[3][:, token] = given[3][:, token]
        for one, all_of_them in zip(run(*alone, **parameters()), together, strict=True):
            assert torch.equal(one[:, token], all_of_them[:, token])


def test_numbers_that_are_none():
    """A query that is no number gives no number; scores of minus infinity count for nothing."""
    given = operands(3, 3, 16, torch.float32)
    given[0][0, 0], given[3][0, 0], given[4][0, 0] = torch.nan, 1, 9
    out, lse = few_tokens(*given, **parameters())
    assert out[0, 0].isnan().all() and lse[0, 0].isnan().all() and out[1].isfinite().all()
    given = operands(3, 3, 16, torch.float32)
    given[0] = given[0].abs()
    given[1][:, ::2] = -torch.inf
    for found, meant in zip(few_tokens(*given, **parameters()), meaning(given, **parameters()), strict=True):
        torch.testing.assert_close(found, meant.float(), equal_nan=True)


@pytest.mark.parametrize("case", ["row", "position", "page"])
def test_tokens_that_are_in_no_page(case):
    """They are refused, with what they ask for, and nothing outside of the operands is read."""
    given = operands(2, 2, 16, torch.float32)
    given[3][0, 2], given[4][0, 2] = 1, 9
    if case == "page":
        given[5][0, 1, 1] = ROWS * LONGEST
    else:
        given[{"row": 3, "position": 4}[case]][0, 2] = 10**9
    with pytest.raises(IndexError, match=r"position \d+ of row \d+ is in no page: there are 3 rows of 5 pages, and 15 pages"):
        few_tokens(*given, **parameters(window=3))


def test_the_default_dtype_counts_for_nothing():
    """Log-sum-exps are float32, whatever tensors are by default."""
    given = operands(2, 2, 16, torch.float32)
    expected = few_tokens(*given, **parameters())
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = few_tokens(*given, **parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ["float64", "a size that is no vector", "pools with gaps"])
def test_what_it_leaves_to_torch(case):
    """The primitive's own implementation asks first, and then does these itself."""
    size, dtype = (20 if "size" in case else 32), (torch.float64 if case == "float64" else torch.float32)
    given = operands(4, 2, size, dtype)
    if "gaps" in case:
        given[1] = torch.stack([given[1], given[1]], -1)[..., 0]
    assert few_tokens(*given, **parameters()) is None
    out, _ = PRIMITIVES["paged_attention"].impl(*given, **parameters())
    assert_close(out, meaning(given, **parameters())[0].to(dtype))


@pytest.mark.parametrize("variant", [*VARIANTS, {"window": 100, "shard": True}], ids=str)
def test_long_prompts_beside_short_ones(variant):
    """A long prompt is computed by products, all else token by token; each row has the bits that it has alone in such a step."""
    runs, (heads, kv_heads, size), length = [(2, 370, 30), (0, 0, 40), (-1, -9, 3), (3, 250, 1), (1, 90, 60)], (4, 2, 32), 400
    draw = torch.Generator().manual_seed(3)
    rows = torch.cat([torch.full((count,), row) for row, _, count in runs])[None]
    positions = torch.cat([torch.arange(first, first + count).clamp(min=-1) for _, first, count in runs])
    pages = torch.randperm(4 * length // PAGE, generator=draw).view(1, 4, -1)
    pools = (torch.randn(1, 4 * length, kv_heads, size, generator=draw) for _ in range(2))
    sinks = torch.randn(heads, generator=draw) if "sinks" in variant else None
    given = [torch.randn(1, rows.shape[1], heads, size, generator=draw), *pools, rows, positions[None], pages, sinks]
    given[5] = given[5] - 40 if "shard" in variant else given[5]
    out, lse = PRIMITIVES["paged_attention"].impl(*given, **parameters(**variant))
    expected, expected_lse = meaning(given, **parameters(**variant))
    assert relative_error(out, expected) <= TOLERANCES[torch.float32]
    assert_close(lse, expected_lse.float())
    for row in range(4):
        alone = [*given[:3], torch.where(rows == row, row, -1), *given[4:]]
        of_row = rows[0] == row
        for one, all_of_them in zip(PRIMITIVES["paged_attention"].impl(*alone, **parameters(**variant)), (out, lse), strict=True):
            assert torch.equal(one[0, of_row], all_of_them[0, of_row])
