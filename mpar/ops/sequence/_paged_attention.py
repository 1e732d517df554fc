"""Paged attention: each token attends to the earlier tokens of its row, whose keys and values lie in pages of a pool.

Kwon et al. 2023, arXiv:2309.06180, section 4.1. A page holds the keys of neighbouring positions of one row; the table of pages
says where. So rows grow without being moved, and tokens of many rows, one new one of each or a whole prompt, are one batch.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from mpar.cpp import assume
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.op_shape import AttentionShape
from mpar.ops.primitive import Cost, Emitter, Primitive
from mpar.ops.sequence._attention import attention_p, with_sinks
from mpar.ops.sequence._few_tokens import few_tokens
from mpar.torch_private import flash_attention_cpu

__all__ = ["paged_attention"]

aten = torch.ops.aten
paged_attention_p = Primitive(
    "paged_attention",
    "q, k, v, rows, positions, pages, sinks? -> out, lse",
    shard="bool",
    page_size="int",
    window="int?",
    scale="float",
    soft_cap="float?",
)
paged_attention_p.asks_host = True
_GATHERED = 2**20
"""The most elements of keys that are copied out of their pages at a time, unless one row has more: they should fit a cache."""
_OnHost = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""For each group, the rows and the positions of its tokens."""
_FEW_TOKENS, _FEW_SCORES = 16, 4096
"""A kernel takes runs of so many tokens, or with so many scores, each token alone: of longer ones products are faster."""


def paged_attention(
    q_BTNH: Tensor,
    k_BPKH: Tensor,
    v_BPKH: Tensor,
    rows_BT: Tensor,
    positions_BT: Tensor,
    pages_BRL: Tensor,
    *,
    page_size: int,
    sinks: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """`out_BTNH`: the average of the values that each token sees, as `attention` has it for a row alone.

    Token t of group b belongs to row `rows_BT[b, t]` and stands there at position `positions_BT[b, t]`. It sees the positions up
    to its own, with a `window` at most that many. Position p of row r lies in the pools at place
    `pages_BRL[b, r, p // page_size] * page_size + p % page_size`. A token of row -1 is padding; its out is 0. What a token gets
    depends on no other row.

    `scale`, `soft_cap`, `sinks` and groups of heads are those of `attention`. There is no gradient. Raises ShapeError, DtypeError
    or ConfigError if the operands do not fit each other.
    """
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    params = {"shard": False, "page_size": page_size, "window": window, "scale": scale, "soft_cap": soft_cap}
    return paged_attention_p.bind(q_BTNH, k_BPKH, v_BPKH, rows_BT, positions_BT, pages_BRL, sinks, **params)[0]


@paged_attention_p.def_abstract
def _abstract(q, k, v, rows, positions, pages, sinks, *, shard, page_size, window, scale, soft_cap):
    label = f"paged_attention of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, pages {tuple(pages.shape)}"
    if not q.ndim == k.ndim == 4 or pages.ndim != 3:
        raise ShapeError(f"{label}: they must be (B, T, N, H), (B, P, K, H), (B, P, K, H), (B, R, L)")
    (B, T, N, H), K = q.shape, k.shape[2]
    problems = []
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (B, H):
        problems.append(f"k and v must both be ({B}, P, K, {H}) to fit q")
    if not K or N % K:
        problems.append(f"{K} kv heads do not divide {N} query heads")
    if page_size < 1 or k.shape[1] % page_size:
        problems.append(f"{k.shape[1]} places are no whole number of pages of {page_size}")
    expected = {"rows": (rows, (B, T)), "positions": (positions, (B, T)), "sinks": (sinks, (N,))}
    problems += [
        f"{name} is {tuple(x.shape)}, must be {shape}"
        for name, (x, shape) in expected.items()
        if x is not None and tuple(x.shape) != shape
    ]
    if pages.shape[0] != B:
        problems.append(f"pages must have {B} groups")
    if problems:
        raise ShapeError(f"{label}:\n" + "\n".join(problems))
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"{label}: dtypes are {q.dtype}, {k.dtype}, {v.dtype}; all three must have the same floating dtype")
    wrong = {str(x.dtype) for x in (rows, positions, pages) if x.dtype != torch.int64}
    if wrong:
        raise DtypeError(f"{label}: rows, positions and pages must be int64, not {', '.join(sorted(wrong))}")
    if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0):
        raise ConfigError(f"{label}: window={window}, soft_cap={soft_cap}; both must be positive or None")
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@paged_attention_p.def_impl
def _impl(q, k, v, rows, positions, pages, sinks, *, shard, page_size, window, scale, soft_cap):
    """`out`, and the log-sum-exp of the scores (B, T, N). shard: the pools lack pages, whose numbers are outside of theirs;
    tokens see only the pages that are there."""
    params = {"shard": shard, "page_size": page_size, "window": window, "scale": scale, "soft_cap": soft_cap}
    on_host = () if q.shape[1] <= _FEW_TOKENS or assume(_are_short, rows, positions) else _on_host(rows, positions)
    short = _without_long_runs(on_host, rows.device) if on_host else rows
    found = few_tokens(q, k, v, short, positions, pages, sinks, **params)
    if found is not None and not on_host:
        return found
    how = _How(shard, page_size, window, scale, soft_cap, sinks)
    page = page_size * k.shape[2] * k.shape[3]
    at_once = 0 if shard else max(1, _GATHERED // page)
    wide = q.dtype if _takes_flash(q, how) else _wide(q)
    results = []
    for group, of_group in enumerate(on_host or _on_host(rows, positions)):
        plan = (_long_runs(*of_group), ()) if found else _plan(*of_group, page_size, at_once, window, wide, q.device)
        pools, others = (k[group].reshape(-1, page), v[group].reshape(-1, page)), found and (found[0][group], found[1][group])
        results.append(_attend(plan, q[group], pools, positions[group], pages[group], how, others))
    if found is not None:
        return found
    if len(results) == 1:  # with few tokens the calls are what takes time
        return results[0][0][None], results[0][1][None]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _on_host(rows: Tensor, positions: Tensor) -> _OnHost:
    return tuple((tuple(a), tuple(b)) for a, b in zip(rows.tolist(), positions.tolist(), strict=True))


class _How(NamedTuple):
    """The parameters of a call, and the sinks, which all groups share."""

    shard: bool
    page_size: int
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: Tensor | None


class _Run(NamedTuple):
    """Neighbouring tokens of one row, which see the first `length` positions of the row."""

    start: int
    end: int
    row: int
    length: int


class _Singles(NamedTuple):
    """Tokens that are alone of their rows, which have about as many pages: their indices (N,), rows (N,) and positions.

    bias: (N, 1, 1, M), zero for the positions of its row that each token sees, -inf for others. Nothing may change it.
    first: whether these are the first rows, in their order.
    """

    num_pages: int
    tokens: Tensor
    rows: Tensor
    first: bool
    bias: Tensor


_Plan = tuple[tuple[_Run, ...], tuple[_Singles, ...]]


def _attend(
    plan: _Plan,
    q_TNH: Tensor,
    pools: tuple[Tensor, Tensor],
    positions_T: Tensor,
    pages_RL: Tensor,
    how: _How,
    others: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The results of one group by its plan, written to those of the tokens that the plan leaves out, if they are there. A page is
    one row of the pools."""
    runs, singles = plan
    if not runs and len(singles) == 1 and singles[0].bias.shape[0] == q_TNH.shape[0]:
        return _attend_each(q_TNH, pools, pages_RL, singles[0], how)
    H = q_TNH.shape[2]
    num_heads = pools[0].shape[1] // how.page_size // H
    if others is None:
        out_TNH = q_TNH.new_zeros(q_TNH.shape)
        lse_TN = torch.full(q_TNH.shape[:2], -torch.inf, dtype=_wide(q_TNH), device=q_TNH.device)
    else:
        out_TNH, lse_TN = others
    for start, end, row, length in runs:
        if length > pages_RL.shape[1] * how.page_size:
            raise IndexError(
                f"paged_attention: position {length - 1} of row {row} is in no page: a row has {pages_RL.shape[1]} pages of "
                f"{how.page_size} positions"
            )
        used, order_M = _pages_of(pages_RL[row, : -(-length // how.page_size)], pools[0].shape[0], how)
        if not used.shape[0]:
            continue
        count = length if order_M is None else order_M.shape[0]
        k_MKH, v_MKH = (pool.index_select(0, used).view(-1, num_heads, H)[:count] for pool in pools)
        operands = q_TNH[None, start:end], k_MKH[None], v_MKH[None], positions_T[start:end], order_M, None, None, how.sinks
        out_BTNH, lse_BTN = attention_p.meaning(*operands, causal=True, window=how.window, scale=how.scale, soft_cap=how.soft_cap)
        out_TNH[start:end], lse_TN[start:end] = out_BTNH[0], lse_BTN[0]
    for single in singles:
        out, lse = _attend_each(q_TNH.index_select(0, single.tokens), pools, pages_RL, single, how)
        out_TNH.index_copy_(0, single.tokens, out)
        lse_TN.index_copy_(0, single.tokens, lse)
    return out_TNH, lse_TN


def _pages_of(pages_L: Tensor, num_pages: int, how: _How) -> tuple[Tensor, Tensor | None]:
    """The pages of a row that are there, and the positions of their keys; None: they are in order, from 0 on."""
    if not how.shard:
        return pages_L, None
    (index_N,) = ((pages_L >= 0) & (pages_L < num_pages)).nonzero(as_tuple=True)
    order_NM = index_N[:, None] * how.page_size + torch.arange(how.page_size, device=pages_L.device)
    return pages_L[index_N], order_NM.flatten()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@functools.lru_cache(maxsize=16)
def _plan(
    rows: Sequence[int],
    positions: Sequence[int],
    page_size: int,
    at_once: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> _Plan:
    """How the tokens of a group are computed. All layers of a step have the same plan, so it is remembered.

    A token that is alone is computed together with others. The number of pages that it sees is rounded up, which depends on its
    own position alone, and so do its bits. at_once: how many pages tokens may have together; 0: each token is a run.
    """
    runs: list[_Run] = []
    by_pages: dict[int, list[int]] = {}
    for run in _all_runs(rows, positions):
        if run.end - run.start > 1 or not at_once:
            runs.append(run)
        else:
            by_pages.setdefault(_rounded((run.length - 1) // page_size + 1), []).append(run.start)
    singles = []
    for num_pages, tokens in sorted(by_pages.items()):
        count = max(1, at_once // num_pages)
        parts = (tuple(tokens[first : first + count]) for first in range(0, len(tokens), count))
        for part in parts:
            own_rows = [rows[i] for i in part]
            bias = _bias([positions[i] for i in part], num_pages * page_size, window, dtype, device)
            index, rows_N = (torch.tensor(each, device=device) for each in (part, own_rows))
            singles.append(_Singles(num_pages, index, rows_N, own_rows == list(range(len(part))), bias))
    return tuple(runs), tuple(singles)


def _all_runs(rows: Sequence[int], positions: Sequence[int]) -> Iterator[_Run]:
    """Neighbouring tokens of the same row, without padding."""
    start = 0
    for row, tokens in itertools.groupby(rows):
        end = start + sum(1 for _ in tokens)
        if row >= 0:
            yield _Run(start, end, row, max(positions[start:end]) + 1)
        start = end


@functools.lru_cache(maxsize=64)
def _long_runs(rows: Sequence[int], positions: Sequence[int]) -> tuple[_Run, ...]:
    """The runs for which products of matrices are faster than a kernel that takes each token alone. That depends on the run, so
    that a row gets the same bits beside any others."""

    def is_long(run: _Run) -> bool:
        count = run.end - run.start
        return count > _FEW_TOKENS and count * run.length > _FEW_SCORES

    return tuple(filter(is_long, _all_runs(rows, positions)))


def _are_short(rows: Tensor, positions: Tensor) -> bool:
    """Whether a kernel takes all runs."""
    return not any(_long_runs(*each) for each in _on_host(rows, positions))


@functools.lru_cache(maxsize=16)
def _without_long_runs(on_host: _OnHost, device: torch.device) -> Tensor:
    """The rows of the tokens (B, T), where those of long runs are padding."""
    left = [list(rows) for rows, _ in on_host]
    for of_group, (rows, positions) in zip(left, on_host, strict=True):
        for start, end, _, _ in _long_runs(rows, positions):
            of_group[start:end] = [-1] * (end - start)
    return torch.tensor(left, device=device)


def _rounded(num_pages: int) -> int:
    """At least this many pages, by at most a quarter more: few different numbers, so that many tokens are computed together."""
    unit = 1 << max(0, num_pages.bit_length() - 3)
    return -(-num_pages // unit) * unit


def _attend_each(
    q_TNH: Tensor, pools: tuple[Tensor, Tensor], pages_RL: Tensor, single: _Singles, how: _How
) -> tuple[Tensor, Tensor]:
    """Attention of each token to keys of its own row; query heads of one kv head are treated as queries of one sequence."""
    (T, N, H), M = q_TNH.shape, single.bias.shape[-1]
    K = pools[0].shape[1] // how.page_size // H
    pages_TL = pages_RL if single.first else pages_RL[single.rows]
    used = pages_TL.as_strided((T, single.num_pages), (pages_TL.stride(0), 1)).reshape(-1)
    layout = (T, K, M, H), (M * K * H, H, K * H, 1)
    k_TKMH, v_TKMH = (pool.index_select(0, used).as_strided(*layout) for pool in pools)
    q_TKGH = q_TNH.view(T, K, N // K, H)
    if _takes_flash(q_TNH, how):
        out_TKGH, lse_TKG = flash_attention_cpu(q_TKGH, k_TKMH, v_TKMH, 0.0, False, attn_mask=single.bias, scale=how.scale)
    else:
        wide = _wide(q_TNH)
        scores = (q_TKGH.to(wide) @ k_TKMH.to(wide).transpose(2, 3)).mul_(how.scale)
        if how.soft_cap is not None:
            scores.div_(how.soft_cap).tanh_().mul_(how.soft_cap)
        scores += single.bias
        lse_TKG = torch.logsumexp(scores, -1)
        out_TKGH = ((scores - lse_TKG.unsqueeze(-1)).exp_() @ v_TKMH.to(wide)).to(q_TNH.dtype)
    out_TNH, lse_TN = out_TKGH.reshape(q_TNH.shape), lse_TKG.reshape(q_TNH.shape[:2])
    return (out_TNH, lse_TN) if how.sinks is None else with_sinks(out_TNH, lse_TN, how.sinks)


def _takes_flash(q_TNH: Tensor, how: _How) -> bool:
    return q_TNH.device.type == "cpu" and how.soft_cap is None


def _bias(positions: Sequence[int], num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    own_T1, keys_M = torch.tensor(positions, device=device).unsqueeze(1), torch.arange(num_keys, device=device)
    hidden_TM = keys_M > own_T1 if window is None else (keys_M > own_T1) | (keys_M <= own_T1 - window)
    return torch.zeros(hidden_TM.shape, dtype=dtype, device=device).masked_fill_(hidden_TM, -torch.inf)[:, None, None]


paged_attention_p.def_sharding(
    "b t (k g) h, b p k h, b p k h, b t, b t, b r l, (k g) -> b t (k g) h, b t (k g)", need_replication="h r l"
)
paged_attention_p.def_batching_loop()


@paged_attention_p.def_sharded("p")
def _attend_on_rank(emit: Emitter, q, k, v, rows, positions, pages, sinks, *, page_size, **params) -> tuple[fx.Node, fx.Node]:
    """Each rank attends to its pages. With the largest lse m of all ranks, out = sum(exp(lse - m) out) / sum(exp(lse - m)).

    What no rank sees anything for, padding, has m = -inf, for which 0 is taken, and a sum of 0, for which 1 is taken.
    """
    emit.opaque()
    first = emit.start_with(emit.axes_of("p"), emit.extent_of("p") // page_size)
    local = emit(aten.sub.Tensor, pages, first)
    params |= {"shard": True, "page_size": page_size}
    results = emit(paged_attention_p, q, k, v, rows, positions, local, None, **params)
    out, lse = emit.getitem(results, 0), emit.getitem(results, 1)
    top = emit.all_reduce(lse, "max")
    top = top if sinks is None else emit(aten.maximum.default, top, sinks)
    top = emit(aten.masked_fill.Scalar, top, emit(aten.eq.Scalar, top, -float("inf")), 0.0)
    share = emit(aten.unsqueeze.default, emit(aten.exp.default, emit(aten.sub.Tensor, lse, top)), -1)
    sums = emit.all_reduce(emit(aten.cat.default, [emit(aten.mul.Tensor, out, share), share], -1), "sum")
    size = emit.shape(q)[-1]
    total, weight = emit(aten.slice.Tensor, sums, 3, 0, size), emit(aten.slice.Tensor, sums, 3, size, size + 1)
    if sinks is not None:
        more = emit(aten.exp.default, emit(aten.sub.Tensor, sinks, top))
        weight = emit(aten.add.Tensor, weight, emit(aten.unsqueeze.default, more, -1))
    lse = emit(aten.add.Tensor, emit(aten.log.default, emit(aten.squeeze.dim, weight, -1)), top)
    weight = emit(aten.masked_fill.Scalar, weight, emit(aten.eq.Scalar, weight, 0), 1.0)
    out = emit(aten.div.Tensor, total, weight)
    dtype = q.meta["val"].dtype
    return (out if out.meta["val"].dtype == dtype else emit(aten._to_copy.default, out, dtype=dtype)), lse


@paged_attention_p.def_cost
def _cost(q, k, v, rows, positions, pages, sinks, *, shard, page_size, window, scale, soft_cap):
    """An upper bound: every row has the most positions, and the tokens are divided among all rows."""
    (B, T, N, H), num_rows = q.shape, pages.shape[1]
    length = pages.shape[2] * page_size
    keys_read = min(T, num_rows) * (length if window is None else min(length, window + page_size))
    copied = 2 * max(_GATHERED, length * k.shape[2] * H) * k.element_size()
    flops = 4 * B * T * N * H * (length if window is None else min(length, window))
    moved = 2 * q.nbytes + 2 * B * keys_read * k.shape[2] * H * k.element_size()
    shape = AttentionShape(H, length, causal=False, backward=False)
    return Cost(flops=flops, bytes=moved, workspace=copied + T * length * (8 + q.element_size()), attention=shape)
