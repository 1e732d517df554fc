"""Cross-entropy of x @ head that never holds the logits of all tokens: it computes those of a chunk of tokens at a time, and the
backward computes them again."""

from math import ceil

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._cross_entropy import (
    add_z_loss,
    check_labels,
    combine_shards,
    formula,
    row_gradients,
    row_losses,
    row_statistics,
    weighted_sum,
)
from mpar.ops._product import add_product, product, product_into
from mpar.ops.primitive import Cost, Primitive

__all__ = ["linear_cross_entropy", "linear_token_losses"]

_PARAMS = {"ignore_index": "int", "vocab_size": "int", "start": "int", "label_smoothing": "float", "chunk": "int"}
linear_cross_entropy_p = Primitive("linear_cross_entropy", "x, head, labels -> loss, lse", **_PARAMS)
linear_cross_entropy_stats_p = Primitive("linear_cross_entropy_stats", "x, head, labels -> lse, target", **_PARAMS)
linear_cross_entropy_grad_p = Primitive("linear_cross_entropy_grad", "x, head, labels, dloss -> loss, lse, dx, dhead", **_PARAMS)
"""Losses and gradients in one op, which makes logits only once: for known cotangents `dloss`, and no cotangents of `lse`."""
linear_cross_entropy_x_grad_p = Primitive("linear_cross_entropy_x_grad", "x, head, labels, dloss -> loss, lse, dx", **_PARAMS)
"""The same without the gradient of the head, for a head that is frozen."""


def linear_cross_entropy(
    x: Tensor,
    head_DV: Tensor,
    labels: Tensor,
    *,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(x @ head_DV, labels, ...)` in the memory of the logits of `chunk` tokens.

    `x` (..., D), `labels` and `token_weights` (...); other arguments as in `cross_entropy`. `chunk` is a bound on memory: an
    implementation may make the logits of fewer tokens at once, or those of more tokens for a part of the vocabulary. The gradient
    of `head_DV` is accumulated in float32 or wider.
    Raises ShapeError, DtypeError or ConfigError if the operands do not fit each other.
    """
    vocab_size = head_DV.shape[-1] if vocab_size is None else vocab_size
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": 0, "label_smoothing": label_smoothing}
    loss, lse = linear_cross_entropy_p.bind(x, head_DV, labels, **params, chunk=chunk)
    return weighted_sum(add_z_loss(loss, lse, labels, ignore_index, z_loss), labels, token_weights, ignore_index)


def linear_token_losses(
    x: Tensor,
    head_DV: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk: int = 1024,
) -> Tensor:
    """`token_losses(x @ head_DV, labels, ...)` in the memory of the logits of `chunk` tokens; see `linear_cross_entropy`."""
    vocab_size = head_DV.shape[-1] if vocab_size is None else vocab_size
    params = {"ignore_index": ignore_index, "vocab_size": vocab_size, "start": 0, "label_smoothing": 0.0}
    return linear_cross_entropy_p.bind(x, head_DV, labels, **params, chunk=chunk)[0]


@linear_cross_entropy_stats_p.def_abstract
@linear_cross_entropy_p.def_abstract
def _abstract(x, head, labels, *, ignore_index, vocab_size, start, label_smoothing, chunk):
    if head.ndim != 2 or x.ndim < 1 or x.shape[-1] != head.shape[0]:
        raise ShapeError(
            f"linear_cross_entropy: x {tuple(x.shape)} and head {tuple(head.shape)}: they must be (..., D) and (D, V)"
        )
    if x.dtype != head.dtype:
        raise DtypeError(f"linear_cross_entropy: x is {x.dtype}, head is {head.dtype}; cast one")
    if chunk < 1:
        raise ConfigError(f"linear_cross_entropy: chunk is {chunk} tokens, must be positive")
    check_labels("linear_cross_entropy", (*x.shape[:-1], head.shape[1]), x.dtype, labels, vocab_size, label_smoothing)
    wide = torch.promote_types(x.dtype, torch.float32)
    loss, lse = (torch.empty(labels.shape, dtype=wide, device=x.device) for _ in range(2))
    return loss, lse


@linear_cross_entropy_grad_p.def_abstract
def _abstract_grad(x, head, labels, dloss, **params):
    loss, lse = _abstract(x, head, labels, **params)
    if dloss.shape != labels.shape:
        shapes = f"dloss {tuple(dloss.shape)} and labels {tuple(labels.shape)}"
        raise ShapeError(f"linear_cross_entropy_grad: {shapes} must have the same shape")
    dx, dhead = (torch.empty(operand.shape, dtype=operand.dtype, device=operand.device) for operand in (x, head))
    return loss, lse, dx, dhead


@linear_cross_entropy_x_grad_p.def_abstract
def _abstract_x_grad(x, head, labels, dloss, **params):
    return _abstract_grad(x, head, labels, dloss, **params)[:3]


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, num_tokens)) for first in range(0, num_tokens, chunk)]


def _per_token(statistics, x, head, labels, chunk, params) -> tuple[Tensor, Tensor]:
    """The first two results of `statistics`, chunk by chunk."""
    x_TD, labels_T = x.reshape(-1, x.shape[-1]), labels.flatten()
    pairs = [statistics(product(x_TD[tokens], head), labels_T[tokens], **params)[:2] for tokens in _chunks(x_TD.shape[0], chunk)]
    if not pairs:
        empty = x.new_empty(labels.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        return empty, empty.clone()
    first, second = (torch.cat(column).view(labels.shape) for column in zip(*pairs, strict=True))
    return first, second


@linear_cross_entropy_p.def_impl
def _impl(x, head, labels, *, chunk, **params):
    return _per_token(row_losses, x, head, labels, chunk, params)


@linear_cross_entropy_stats_p.def_impl
def _impl_stats(x, head, labels, *, chunk, **params):
    return _per_token(row_statistics, x, head, labels, chunk, params)


def _gradients(x_TD, head, labels_T, statistics, dloss_T, dlse_T, params, chunk, dhead: Tensor | None = None) -> Tensor:
    """dx, chunk by chunk; `statistics(logits, tokens)` gives the log-sum-exp of each row of a chunk. The gradient of the head is
    added to `dhead`."""
    head, chunks = head.contiguous(), _chunks(x_TD.shape[0], chunk)
    dx_TD = x_TD.new_empty(x_TD.shape if len(chunks) != 1 else 0)
    for tokens in chunks:
        logits = product(x_TD[tokens], head)
        lse_T = statistics(logits, tokens)
        dlse = None if dlse_T is None else dlse_T[tokens]
        dlogits = row_gradients(logits, labels_T[tokens], lse_T, dloss_T[tokens], dlse, **params, out=logits)
        if len(chunks) == 1:
            dx_TD = product(dlogits, head.T)
        else:
            product_into(dx_TD[tokens], dlogits, head.T)
        if dhead is not None and dhead.dtype == dlogits.dtype:
            add_product(dhead, x_TD[tokens].T, dlogits)
        elif dhead is not None:
            dhead += x_TD[tokens].T @ dlogits
        del logits, dlogits  # before there are others
    return dx_TD


def _zeros_like_head(x: Tensor, head: Tensor) -> Tensor:
    """What the gradient of the head is added to: float32 or wider."""
    return torch.zeros(head.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


@linear_cross_entropy_p.def_vjp("x, head, labels, lse, dloss, dlse -> dx, dhead")
def _vjp(x, head, labels, lse, dloss, dlse, *, chunk, **params):
    dhead = _zeros_like_head(x, head)
    return _pull_back(x, head, labels, lse, dloss, dlse, chunk, params, dhead), dhead.to(head.dtype)


@linear_cross_entropy_p.def_vjp_part("x, head, labels, lse, dloss, dlse -> dx")
def linear_cross_entropy_x_bwd_p(x, head, labels, lse, dloss, dlse, *, chunk, **params):
    """The gradient of x alone, for a head that is frozen."""
    return _pull_back(x, head, labels, lse, dloss, dlse, chunk, params)


def _pull_back(x, head, labels, lse, dloss, dlse, chunk, params, dhead=None) -> Tensor:
    """dx from what the forward kept; the gradient of the head is added to `dhead`."""
    dloss = torch.zeros_like(lse) if dloss is None else dloss
    x_TD, labels_T, lse_T, dloss_T = x.reshape(-1, x.shape[-1]), labels.flatten(), lse.flatten(), dloss.flatten()
    dlse_T = None if dlse is None else dlse.flatten()
    dx_TD = _gradients(x_TD, head, labels_T, lambda _, tokens: lse_T[tokens], dloss_T, dlse_T, params, chunk, dhead)
    return dx_TD.view(x.shape)


@linear_cross_entropy_grad_p.def_impl
def _impl_grad(x, head, labels, dloss, *, chunk, **params):
    dhead = _zeros_like_head(x, head)
    return *_loss_and_dx(x, head, labels, dloss, chunk, params, dhead), dhead.to(head.dtype)


@linear_cross_entropy_x_grad_p.def_impl
def _impl_x_grad(x, head, labels, dloss, *, chunk, **params):
    return _loss_and_dx(x, head, labels, dloss, chunk, params)


def _loss_and_dx(x, head, labels, dloss, chunk, params, dhead=None) -> tuple[Tensor, Tensor, Tensor]:
    """`(loss, lse, dx)`; the gradient of the head is added to `dhead`."""
    x_TD, labels_T = x.reshape(-1, x.shape[-1]), labels.flatten()
    wide = torch.promote_types(x.dtype, torch.float32)
    loss_T, lse_T = (torch.empty(labels_T.shape, dtype=wide, device=x.device) for _ in range(2))

    def statistics(logits: Tensor, tokens: slice) -> Tensor:
        loss_T[tokens], lse_T[tokens] = row_losses(logits, labels_T[tokens], **params)
        return lse_T[tokens]

    dx_TD = _gradients(x_TD, head, labels_T, statistics, dloss.flatten().to(wide), None, params, chunk, dhead)
    return loss_T.view(labels.shape), lse_T.view(labels.shape), dx_TD.view(x.shape)


linear_cross_entropy_p.def_formula(lambda x, head, labels, *, chunk, **params: formula(x @ head, labels, **params))


@linear_cross_entropy_p.def_sharded("v")
def _sharded(emit, x, head, labels, **params):
    params |= {"start": emit.start}
    return combine_shards(emit, emit(linear_cross_entropy_stats_p, x, head, labels, **params), labels, params["ignore_index"])


@linear_cross_entropy_p.bwd.def_sharded("v")
def _sharded_bwd(emit, x, head, labels, lse, dloss, dlse, **params):
    grads = emit(linear_cross_entropy_p.bwd, x, head, labels, lse, dloss, dlse, **params | {"start": emit.start})
    return emit.pending(emit.getitem(grads, 0)), emit.getitem(grads, 1)


@linear_cross_entropy_x_bwd_p.def_sharded("v")
def _sharded_x_bwd(emit, x, head, labels, lse, dloss, dlse, **params):
    return emit.pending(emit(linear_cross_entropy_x_bwd_p, x, head, labels, lse, dloss, dlse, **params | {"start": emit.start}))


def _chunk_bytes(x: Tensor, head: Tensor, labels: Tensor, chunk: int) -> int:
    """Bytes of the logits of a chunk, of a wide copy if they are narrow, and of a few numbers per token."""
    wide = 4 if x.element_size() < 4 else 0
    return min(chunk, labels.numel()) * head.shape[1] * (x.element_size() + wide) + 40 * labels.numel()


def _cost(x, head, labels, *, chunk, **_):
    flops = 2 * x.numel() * head.shape[1]
    shape = _chunk_shape(head, labels, chunk, 1)
    workspace, logits = _chunk_bytes(x, head, labels, chunk), labels.numel() * head.shape[1]
    return Cost(flops=flops, bytes=x.nbytes + head.nbytes, workspace=workspace, transcendentals=logits, matmul=shape)


@linear_cross_entropy_p.bwd.def_cost
@linear_cross_entropy_grad_p.def_cost
def _cost_bwd(x, head, labels, *_, chunk, **__):
    wide = 2 * head.numel() * 4 if x.element_size() < 4 else 0
    workspace = _chunk_bytes(x, head, labels, chunk) + wide
    shape, moved = _chunk_shape(head, labels, chunk, 3), 2 * (x.nbytes + head.nbytes)
    logits = labels.numel() * head.shape[1]
    return Cost(6 * x.numel() * head.shape[1], moved, workspace=workspace, transcendentals=2 * logits, matmul=shape)


@linear_cross_entropy_x_bwd_p.def_cost
@linear_cross_entropy_x_grad_p.def_cost
def _cost_x_bwd(x, head, labels, *_, chunk, **__):
    shape, moved = _chunk_shape(head, labels, chunk, 2), 2 * x.nbytes + head.nbytes
    flops, logits = 4 * x.numel() * head.shape[1], labels.numel() * head.shape[1]
    return Cost(flops, moved, workspace=_chunk_bytes(x, head, labels, chunk), transcendentals=2 * logits, matmul=shape)


def _chunk_shape(head: Tensor, labels: Tensor, chunk: int, products: int) -> MatmulShape:
    """The products of all chunks, each with the logits of a chunk as its result or operand."""
    rows = labels.numel()
    return MatmulShape(batch=products * ceil(rows / chunk), m=min(chunk, rows), n=head.shape[1], k=head.shape[0])


linear_cross_entropy_grad_p.asks_host = linear_cross_entropy_x_grad_p.asks_host = True
for _primitive in (linear_cross_entropy_p, linear_cross_entropy_stats_p):
    _primitive.asks_host = True
    _primitive.def_sharding("... d, d v, ... -> ..., ...", need_replication="d v")
    _primitive.def_batching_leading()
    _primitive.def_cost(_cost)
linear_cross_entropy_p.bwd.def_sharding("... d, d v, ..., ..., ..., ... -> ... d, d v", need_replication="d")
linear_cross_entropy_p.bwd.def_batching_leading()
linear_cross_entropy_grad_p.def_sharding("... d, d v, ..., ... -> ..., ..., ... d, d v", need_replication="d v")
linear_cross_entropy_grad_p.def_batching_leading()
linear_cross_entropy_x_bwd_p.def_sharding("... d, d v, ..., ..., ..., ... -> ... d", need_replication="d")
linear_cross_entropy_x_bwd_p.def_batching_leading()
linear_cross_entropy_x_grad_p.def_sharding("... d, d v, ..., ... -> ..., ..., ... d", need_replication="d v")
linear_cross_entropy_x_grad_p.def_batching_leading()
linear_cross_entropy_p.bwd.opaque = linear_cross_entropy_x_bwd_p.opaque = True  # so that only a chunk of logits is in memory
