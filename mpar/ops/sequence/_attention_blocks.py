"""Attention on the CPU by blocks of queries and keys: blocks that no query sees are not computed, and masks have few rows.

An order often consists of few runs of consecutive numbers, as when each rank has an early and a late section of a sequence (Llama
3, arXiv:2407.21783); blocks are cut where runs end. Between a run of queries and a run of keys, the visible pairs are all, none,
a triangle or a band. The results of several blocks for the same queries are merged by their log-sum-exps, in the order of the
blocks. Documents that share a row of the batch are blocks of their own, unless there are so many that masks cost less.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpar.ops.sequence._flash import flash, flash_backward

__all__ = ["ROWS", "Block", "Masks", "backward", "blocks_of", "forward", "mask_rows", "visible"]

ROWS = 1024
"""The most rows, which are queries, of one mask."""
MASK_PAIRS = 2**24
"""The most pairs of one mask, unless SHORT_RUN rows already have more."""
SHORT_RUN = 64
"""If runs are shorter than this on average, or there are more than MANY_PAIRS pairs of runs, blocks are not cut by runs."""
CALL_PAIRS = 4096
"""In the time of one more call of the kernel, forward and backward, it computes about so many pairs (8 heads of 32 features)."""
MANY_PAIRS = 1024
_KEPT: dict[tuple[object, ...], Sequence["Block"]] = {}
_MOST_KEPT = 32


class Block(NamedTuple):
    """Queries and keys of one call of the kernel.

    aligned: whether query i of the block sees keys 0 to i of the block, so that the kernel can apply a causal mask.
    masked:  whether the block needs a mask.
    batch:   the rows of the batch that it is for.
    """

    rows: slice
    keys: slice
    aligned: bool
    masked: bool
    batch: slice = slice(None)

    @property
    def pairs(self) -> int:
        """How many pairs the kernel computes for one row of the batch."""
        found = (self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start)
        return found // 2 if self.aligned else found


class Masks(NamedTuple):
    """The arguments of `attention` that decide which query sees which key."""

    q_order: Tensor | None
    k_order: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    causal: bool
    window: int | None


class _Run(NamedTuple):
    """Neighbouring places from `start` on, whose order is `first`, `first` + 1, ..., `end` - 1."""

    start: int
    first: int
    end: int

    def clip(self, first: int, end: int) -> "_Run":
        first, end = max(first, self.first), min(end, self.end)
        return _Run(self.start + first - self.first, first, max(first, end))

    def split(self, size: int) -> list["_Run"]:
        return [self.clip(first, first + size) for first in range(self.first, self.end, size)]

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.end - self.first)


def mask_rows(num_keys: int) -> int:
    """How many rows a mask over `num_keys` keys has at most."""
    return max(SHORT_RUN, min(ROWS, MASK_PAIRS // max(1, num_keys)))


def visible(q_order: Tensor, k_order: Tensor, q_documents, k_documents, causal: bool, window: int | None) -> Tensor:
    """Which query sees which key, (B or 1, S, M)."""
    distance = q_order.unsqueeze(1) - k_order
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance < window
    if q_documents is None:
        return seen.unsqueeze(0)
    documents = q_documents.unsqueeze(2)
    return seen & (documents == k_documents.unsqueeze(1)) & (documents != -1)


def blocks_of(num_queries: int, num_keys: int, masks: Masks) -> Sequence[Block]:
    """Blocks that contain every visible pair exactly once; pairs in no block are hidden. They are the same in all layers of a
    model, so the last ones are kept."""
    orders_and_documents = masks[:4]
    if all(x is None for x in orders_and_documents):
        return _cut_all(num_queries, num_keys, masks)
    key = num_queries, num_keys, masks.causal, masks.window, *map(_digest, orders_and_documents)
    found = _KEPT.get(key)
    if found is None:
        found = _KEPT[key] = _cut_all(num_queries, num_keys, masks)
        for old in list(_KEPT)[:-_MOST_KEPT]:
            _KEPT.pop(old, None)
    return found


def _digest(x: Tensor | None) -> tuple[object, ...] | None:
    """What two tensors have in common only if they are equal."""
    return None if x is None else (x.dtype, x.shape, hashlib.blake2b(x.contiguous().numpy().tobytes()).digest())


def _cut_all(num_queries: int, num_keys: int, masks: Masks) -> list[Block]:
    documents = masks.q_documents is not None
    if documents and (blocks := _blocks_of_documents(masks)) is not None:
        return blocks
    if not masks.causal and masks.window is None:
        all_queries = _Run(0, 0, num_queries)
        sub_runs = all_queries.split(mask_rows(num_keys)) if documents else [all_queries]
        return [Block(sub_run.place, slice(0, num_keys), False, documents) for sub_run in sub_runs]
    q_runs, k_runs = _runs(masks.q_order, num_queries), _runs(masks.k_order, num_keys)
    if _scattered(q_runs, num_queries) or _scattered(k_runs, num_keys) or len(q_runs) * len(k_runs) > MANY_PAIRS:
        sub_runs = _Run(0, 0, num_queries).split(mask_rows(num_keys))
        return [Block(sub_run.place, slice(0, num_keys), False, True) for sub_run in sub_runs]
    if documents:
        q_runs = [sub_run for run in q_runs for sub_run in run.split(mask_rows(num_keys))]
    blocks = [block for q_run in q_runs for k_run in k_runs for block in _cut(q_run, k_run, masks.causal, masks.window)]
    return [block._replace(masked=block.masked or documents) for block in blocks]


def _blocks_of_documents(masks: Masks) -> list[Block] | None:
    """Blocks each of which is within a document; None if there are so many documents that masks cost less."""
    assert masks.q_documents is not None and masks.k_documents is not None
    (batch, num_queries), num_keys = masks.q_documents.shape, masks.k_documents.shape[1]
    all_pairs = batch * num_queries * num_keys
    q_runs = _document_runs(masks.q_order, masks.q_documents, all_pairs // CALL_PAIRS)
    k_runs = _document_runs(masks.k_order, masks.k_documents, all_pairs // CALL_PAIRS)
    if q_runs is None or k_runs is None:
        return None
    blocks = []
    for row in range(batch):
        runs_of = defaultdict(list)
        for document, k_run in k_runs[row]:
            runs_of[document].append(k_run)
        for document, q_run in q_runs[row]:
            for k_run in runs_of[document]:
                cut = _cut(q_run, k_run, masks.causal, masks.window)
                blocks += [block._replace(batch=slice(row, row + 1)) for block in cut]
    return blocks if sum(block.pairs + CALL_PAIRS for block in blocks) < all_pairs else None


def _document_runs(order: Tensor | None, documents: Tensor, most: int) -> list[list[tuple[int, _Run]]] | None:
    """For each row of the batch, the runs that are of one document, with it; None if there are more than `most` in all."""
    batch, size = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents.diff(dim=1) != 0
    if order is not None:
        begins[:, 1:] |= order.diff() != 1
    places = begins.nonzero()
    if len(places) > most:
        return None
    rows, starts = places.T.tolist()
    firsts = starts if order is None else order[places[:, 1]].tolist()
    ends = [b if i == j else size for i, j, b in zip(rows, [*rows[1:], -1], [*starts[1:], 0], strict=True)]
    found: list[list[tuple[int, _Run]]] = [[] for _ in range(batch)]
    for row, start, first, end, document in zip(rows, starts, firsts, ends, documents[begins].tolist(), strict=True):
        if document != -1:
            found[row].append((document, _Run(start, first, first + end - start)))
    return found


def _scattered(runs: list[_Run], size: int) -> bool:
    return len(runs) > 1 and size < SHORT_RUN * len(runs)


def _runs(order: Tensor | None, size: int) -> list[_Run]:
    if order is None:
        return [_Run(0, 0, size)]
    jumps = (order.diff() != 1).nonzero().flatten() + 1
    starts = [0, *jumps.tolist()]
    sizes = (b - a for a, b in zip(starts, [*starts[1:], size], strict=True))
    return [_Run(start, first, first + n) for start, first, n in zip(starts, order[starts].tolist(), sizes, strict=True)]


def _cut(q: _Run, k: _Run, causal: bool, window: int | None) -> Iterator[Block]:
    """The blocks that contain the visible pairs of a run of queries and a run of keys."""
    k = k.clip(k.first if window is None else q.first - window + 1, q.end if causal else k.end)
    if k.first == k.end:
        return
    if window is not None and q.end - k.first > window:  # the last query does not see the first key
        size = min(ROWS, max(window, 2 * SHORT_RUN))
        if q.end - q.first > size:
            for sub_run in q.split(size):
                yield from _cut(sub_run, k, causal, window)
            return
        edge = q.end - window
        yield Block(q.place, k.clip(k.first, edge).place, False, True)
        yield from _cut(q, k.clip(edge, k.end), causal, window)
    elif not causal or k.end <= q.first + 1:
        yield Block(q.place, k.place, False, False)
    else:
        before = k.clip(k.first, q.first)
        if before.first < before.end:
            yield Block(q.place, before.place, False, False)
        start = max(q.first, k.first)
        yield Block(q.clip(start, q.end).place, k.clip(start, k.end).place, True, False)


def _mask(block: Block, q: Tensor, k: Tensor, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
    """`(seen, bias)` of a block that needs a mask, else `(None, None)`.

    seen (B or 1, rows, keys) says which query sees which key; bias has one more dim, for heads, and is -inf for hidden pairs.
    """
    if not block.masked:
        return None, None
    q_order = torch.arange(q.shape[2]) if masks.q_order is None else masks.q_order
    k_order = torch.arange(k.shape[2]) if masks.k_order is None else masks.k_order
    q_documents, k_documents = masks.q_documents, masks.k_documents
    if q_documents is not None and k_documents is not None:
        q_documents, k_documents = q_documents[block.batch, block.rows], k_documents[block.batch, block.keys]
    seen = visible(q_order[block.rows], k_order[block.keys], q_documents, k_documents, masks.causal, masks.window)
    return seen, torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf).unsqueeze(1)


def forward(q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float) -> tuple[Tensor, Tensor]:
    """`(out_BNSH, lse_BNS)` of operands with heads first, all of one head size."""
    blocks = blocks_of(q.shape[2], k.shape[2], masks)
    if len(blocks) == 1 and (blocks[0].batch, blocks[0].rows) == (slice(None), slice(0, q.shape[2])):
        return _one_forward(blocks[0], q, k, v, masks, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
    if _are_apart([(block.batch, block.rows) for block in blocks]):
        out = _heads_last(q, q.dtype)
        for block in blocks:
            place = block.batch, slice(None), block.rows
            lse[place] = _one_forward(block, q, k, v, masks, scale, out[place])[1]
        return _without_rest(out, [(block.batch, block.rows) for block in blocks]), lse
    out = _heads_last(q, wide).zero_()
    for block in blocks:
        out_b, lse_b = _one_forward(block, q, k, v, masks, scale)
        out_a, lse_a = out[block.batch, :, block.rows], lse[block.batch, :, block.rows]
        total = torch.logaddexp(lse_a, lse_b)
        level = total.masked_fill(total == -torch.inf, 0.0)
        out_a.mul_(torch.exp(lse_a - level).unsqueeze(-1)).addcmul_(out_b.to(wide), torch.exp(lse_b - level).unsqueeze(-1))
        lse_a.copy_(total)
    return out.to(q.dtype), lse


def _are_apart(places: Sequence[tuple[slice, slice]]) -> bool:
    """Whether no token is in two of the places, which are rows of the batch and tokens; all places have one row, or all rows."""
    ordered = sorted((batch.start or 0, tokens.start, tokens.stop) for batch, tokens in places)
    return all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ordered))


def _without_rest(x: Tensor, places: Sequence[tuple[slice, slice]]) -> Tensor:
    """`x` (B, N, S, H), with zeros written to the tokens that are in none of the places."""
    rows = defaultdict(list)
    for batch, tokens in sorted(places, key=lambda place: place[1].start):
        rows[batch.start].append(tokens)
    for row in [None] if None in rows else range(x.shape[0]):
        end = 0
        for tokens in [*rows[row], slice(x.shape[2], None)]:
            if end < tokens.start:
                x[slice(None) if row is None else row, ..., end : tokens.start, :] = 0
            end = tokens.stop
    return x


def _one_forward(
    block: Block, q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    seen, bias = _mask(block, q, k, masks)
    q, k, v = q[block.batch, :, block.rows], k[block.batch, :, block.keys], v[block.batch, :, block.keys]
    out, lse = flash(q, k, v, block.aligned, bias, scale, out)
    if seen is not None:
        lse.masked_fill_(~seen.any(-1).unsqueeze(1), -torch.inf)
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masks: Masks, scale: float) -> list[Tensor]:
    """`[dq, dk, dv]`, like q, k, v. `out` and `lse` are the results for all keys; `lse` is inf for queries that see no key."""
    blocks = blocks_of(q.shape[2], k.shape[2], masks)
    everything = slice(None), slice(0, q.shape[2]), slice(0, k.shape[2])
    if len(blocks) == 1 and (blocks[0].batch, blocks[0].rows, blocks[0].keys) == everything:
        return list(_one_backward(blocks[0], dout, q, k, v, out, lse, masks, scale))
    queries, keys = [(block.batch, block.rows) for block in blocks], [(block.batch, block.keys) for block in blocks]
    if _are_apart(queries) and _are_apart(keys):
        dq, dk, dv = (_heads_last(x, x.dtype) for x in (q, k, v))
        for block in blocks:
            into = dq[block.batch, :, block.rows], dk[block.batch, :, block.keys], dv[block.batch, :, block.keys]
            _one_backward(block, dout, q, k, v, out, lse, masks, scale, into)
        return [_without_rest(x, places) for x, places in ((dq, queries), (dk, keys), (dv, keys))]
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (_heads_last(x, wide).zero_() for x in (q, k, v))
    for block in blocks:
        block_grads = _one_backward(block, dout, q, k, v, out, lse, masks, scale)
        for total, block_grad, place in zip((dq, dk, dv), block_grads, (block.rows, block.keys, block.keys), strict=True):
            total[block.batch, :, place] += block_grad
    return [grad.to(q.dtype) for grad in (dq, dk, dv)]


def _one_backward(
    block: Block, dout, q, k, v, out, lse, masks: Masks, scale: float, into: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    _, bias = _mask(block, q, k, masks)
    dout, q, out, lse = (x[block.batch, :, block.rows] for x in (dout, q, out, lse))
    k, v = k[block.batch, :, block.keys], v[block.batch, :, block.keys]
    return flash_backward(dout, q, k, v, out, lse, block.aligned, bias, scale, into)


def _heads_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of `x`, (B, N, S, H), stored as (B, S, N, H)."""
    return torch.empty_like(x.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)
