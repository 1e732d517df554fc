"""Cross-entropy of x @ head without ever holding the logits of all tokens: a chunk of tokens at a time, made again backward."""

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops._cross_entropy import check_labels, combine_shards, masked_loss, row_gradients, row_statistics, weighted_sum
from mpar.ops._primitive import Cost, Primitive

__all__ = ["linear_cross_entropy"]

_PARAMS = {"ignore_index": "int", "vocab_size": "int", "start": "int", "chunk": "int"}
linear_cross_entropy_p = Primitive("linear_cross_entropy", "x, head, labels -> loss, lse", **_PARAMS)
linear_cross_entropy_stats_p = Primitive("linear_cross_entropy_stats", "x, head, labels -> lse, target", **_PARAMS)


def linear_cross_entropy(
    x: Tensor,
    head_DV: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(x @ head_DV, labels, ...)` with the logits of `chunk` tokens in memory at a time.

    `x` (..., D), `labels` and `token_weights` (...); the rest as in `cross_entropy`. The gradient of `head_DV` is accumulated in
    float32 or wider. Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    vocab_size = head_DV.shape[-1] if vocab_size is None else vocab_size
    loss, _ = linear_cross_entropy_p.bind(
        x, head_DV, labels, ignore_index=ignore_index, vocab_size=vocab_size, start=0, chunk=chunk
    )
    return weighted_sum(loss, labels, token_weights, ignore_index)


@linear_cross_entropy_stats_p.def_abstract
@linear_cross_entropy_p.def_abstract
def _abstract(x, head, labels, *, ignore_index, vocab_size, start, chunk):
    if head.ndim != 2 or x.ndim < 1 or x.shape[-1] != head.shape[0]:
        raise ShapeError(
            f"linear_cross_entropy: x {tuple(x.shape)} and head {tuple(head.shape)}: they must be (..., D) and (D, V)"
        )
    if x.dtype != head.dtype:
        raise DtypeError(f"linear_cross_entropy: x is {x.dtype}, head is {head.dtype}; cast one")
    if chunk < 1:
        raise ConfigError(f"linear_cross_entropy: chunk is {chunk} tokens, must be positive")
    check_labels("linear_cross_entropy", (*x.shape[:-1], head.shape[1]), x.dtype, labels, vocab_size)
    wide = torch.promote_types(x.dtype, torch.float32)
    loss, lse = (torch.empty(labels.shape, dtype=wide, device=x.device) for _ in range(2))
    return loss, lse


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, num_tokens)) for first in range(0, num_tokens, chunk)]


def _statistics(x, head, labels, ignore_index, vocab_size, start, chunk) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, labels_T = x.reshape(-1, x.shape[-1]), labels.flatten()
    parts = []
    for tokens in _chunks(x_TD.shape[0], chunk):
        params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": start}
        parts.append(row_statistics(x_TD[tokens] @ head, labels_T[tokens], **params))
    if not parts:
        empty = x.new_empty(labels.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return empty, empty.clone(), empty.clone()
    lse, target, loss = (torch.cat(column).view(labels.shape) for column in zip(*parts, strict=True))
    return lse, target, loss


@linear_cross_entropy_p.def_impl
def _impl(x, head, labels, *, ignore_index, vocab_size, start, chunk):
    lse, target, loss = _statistics(x, head, labels, ignore_index, vocab_size, start, chunk)
    if start or vocab_size > head.shape[1]:  # the head holds a part of the columns: the label's may not be among them
        loss = masked_loss(lse - target, labels, ignore_index)
    return loss, lse


@linear_cross_entropy_stats_p.def_impl
def _impl_stats(x, head, labels, *, ignore_index, vocab_size, start, chunk):
    return _statistics(x, head, labels, ignore_index, vocab_size, start, chunk)[:2]


@linear_cross_entropy_p.def_vjp("x, head, labels, lse, dloss, dlse -> dx, dhead")
def _vjp(x, head, labels, lse, dloss, dlse, *, ignore_index, vocab_size, start, chunk):
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    x_TD, head = x.reshape(-1, x.shape[-1]), head.contiguous()
    per_token = [None if p is None else p.flatten() for p in (labels, lse, dloss, dlse)]
    dx_TD = torch.empty(x_TD.shape, dtype=x.dtype, device=x.device)
    dhead = torch.zeros(head.shape, dtype=lse.dtype, device=x.device)
    buffer = x.new_empty(min(chunk, x_TD.shape[0]), head.shape[1])
    for tokens in _chunks(*x_TD.shape[:1], chunk):
        logits = torch.mm(x_TD[tokens], head, out=buffer[: tokens.stop - tokens.start])
        parts = [None if p is None else p[tokens] for p in per_token]
        params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": start}
        dlogits = row_gradients(logits, *parts, **params, out=logits)
        torch.mm(dlogits, head.T, out=dx_TD[tokens])
        if dhead.dtype == dlogits.dtype:
            dhead.addmm_(x_TD[tokens].T, dlogits)
        else:
            dhead += x_TD[tokens].T @ dlogits
    return dx_TD.view(x.shape), dhead.to(head.dtype)


@linear_cross_entropy_p.def_sharded("v")
def _sharded(emit, x, head, labels, *, ignore_index, vocab_size, start, chunk):
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": emit.start, "chunk": chunk}
    return combine_shards(emit, emit(linear_cross_entropy_stats_p, x, head, labels, **params), labels, ignore_index)


@linear_cross_entropy_p.bwd.def_sharded("v")
def _sharded_bwd(emit, x, head, labels, lse, dloss, dlse, *, ignore_index, vocab_size, start, chunk):
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": emit.start, "chunk": chunk}
    grads = emit(linear_cross_entropy_p.bwd, x, head, labels, lse, dloss, dlse, **params)
    return emit.pending(emit.getitem(grads, 0)), emit.getitem(grads, 1)


def _chunk_bytes(x: Tensor, head: Tensor, labels: Tensor, chunk: int) -> int:
    """Logits of a chunk, a wide copy where they are narrow, and a few numbers per token."""
    wide = 4 if x.element_size() < 4 else 0
    return min(chunk, labels.numel()) * head.shape[1] * (x.element_size() + wide) + 40 * labels.numel()


def _cost(x, head, labels, *, ignore_index, vocab_size, start, chunk):
    flops = 2 * x.numel() * head.shape[1]
    return Cost(flops=flops, bytes=x.nbytes + head.nbytes, workspace=_chunk_bytes(x, head, labels, chunk))


@linear_cross_entropy_p.bwd.def_cost
def _cost_bwd(x, head, labels, lse, dloss, dlse, *, ignore_index, vocab_size, start, chunk):
    wide = 2 * head.numel() * 4 if x.element_size() < 4 else 0
    workspace = _chunk_bytes(x, head, labels, chunk) + wide
    return Cost(flops=6 * x.numel() * head.shape[1], bytes=2 * (x.nbytes + head.nbytes), workspace=workspace)


for _primitive in (linear_cross_entropy_p, linear_cross_entropy_stats_p):
    _primitive.def_sharding("... d, d v, ... -> ..., ...", need_replication="d v")
    _primitive.def_batching_leading()
    _primitive.def_cost(_cost)
linear_cross_entropy_p.bwd.def_sharding("... d, d v, ..., ..., ..., ... -> ... d, d v", need_replication="d")
linear_cross_entropy_p.bwd.def_batching_leading()
