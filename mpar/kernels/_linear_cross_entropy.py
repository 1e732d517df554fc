"""Cross-entropy of x @ head by chunks: cuBLAS makes the logits of a chunk, our kernels turn them in place into their gradient."""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from mpar.kernels._cross_entropy import LossParams, RowParams, check_dtypes, fused_rows, gradient_rows, loss_rows
from mpar.kernels._head_chunks import Chunks, backward_chunks, forward_chunks, grad_chunks

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_grad",
    "linear_cross_entropy_stats",
]


def linear_cross_entropy(
    x: Tensor, head: Tensor, labels: Tensor, *, chunk: int, **params: Unpack[LossParams]
) -> tuple[Tensor, Tensor]:
    """`(loss, lse)` of each token; see `mpar.ops.linear_cross_entropy`."""
    lse, loss = _per_token(x, head, labels, chunk, params, loss=True)
    return loss, lse


def linear_cross_entropy_stats(
    x: Tensor, head: Tensor, labels: Tensor, *, chunk: int, **params: Unpack[LossParams]
) -> tuple[Tensor, Tensor]:
    """`(lse, target)` of each token over the columns that `head` has."""
    return _per_token(x, head, labels, chunk, params, loss=False)


def linear_cross_entropy_bwd(
    x: Tensor,
    head: Tensor,
    labels: Tensor,
    lse: Tensor,
    dloss: Tensor | None,
    dlse: Tensor | None,
    *,
    chunk: int,
    start: int,
    **params: Unpack[RowParams],
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `head`, summed over chunks in float32."""
    check_dtypes("linear_cross_entropy_bwd", x, head, lse, dloss, dlse)
    labels_T, lse_T = labels.reshape(-1), lse.reshape(-1)
    dloss_T, dlse_T = (None if p is None else p.reshape(-1) for p in (dloss, dlse))

    def pull_back(logits: Tensor, tokens: slice, columns: slice) -> None:
        dloss, dlse = (None if p is None else p[tokens] for p in (dloss_T, dlse_T))
        here = start + columns.start
        gradient_rows(logits, labels_T[tokens], lse_T[tokens], dloss, dlse, logits, start=here, **params)

    return _gradients(x, head, backward_chunks(x, head, chunk), pull_back)


def linear_cross_entropy_grad(
    x: Tensor, head: Tensor, labels: Tensor, dloss: Tensor, *, chunk: int, **params: Unpack[LossParams]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(loss, lse, dx, dhead)`: the logits are computed only once for all four."""
    check_dtypes("linear_cross_entropy_grad", x, head, dloss)
    labels_T, dloss_T = labels.reshape(-1), dloss.reshape(-1)
    loss, lse = (torch.empty(labels.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    loss_T, lse_T = loss.view(-1), lse.view(-1)

    def pull_back(logits: Tensor, tokens: slice, columns: slice) -> None:
        fused_rows(logits, labels_T[tokens], dloss_T[tokens], lse_T[tokens], loss_T[tokens], **params)

    return loss, lse, *_gradients(x, head, grad_chunks(x, head, chunk), pull_back)


def _per_token(
    x: Tensor, head: Tensor, labels: Tensor, chunk: int, params: LossParams, *, loss: bool
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each token, and its loss, or without `loss` its target."""
    check_dtypes("linear_cross_entropy", x, head)
    x_TD, labels_T = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    lse, second = (torch.empty(labels.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    chunks = forward_chunks(x, head, chunk)
    memory = _memory(x, chunks)
    for tokens in chunks[0]:
        logits = _product(x_TD[tokens], head, memory)
        loss_rows(logits, labels_T[tokens], lse.view(-1)[tokens], second.view(-1)[tokens], loss=loss, **params)
    return lse, second


def _gradients(
    x: Tensor, head: Tensor, chunks: Chunks, pull_back: Callable[[Tensor, slice, slice], None]
) -> tuple[Tensor, Tensor]:
    """`(dx, dhead)`, where `pull_back(logits, tokens, columns)` turns the logits of a chunk into their gradient.

    Chunks divide the tokens or the columns, so one gradient is written part by part, and the other is a sum over chunks.
    """
    x_TD = x.reshape(-1, x.shape[-1])
    dx, dhead = (torch.empty(operand.shape, dtype=operand.dtype, device=operand.device) for operand in (x_TD, head))
    dx_sum = _sum_of(dx, len(chunks[1]))
    dhead_sum = _sum_of(dhead, len(chunks[0]))
    memory = _memory(x, chunks)
    for tokens in chunks[0]:
        for columns in chunks[1]:
            x_part, head_part = x_TD[tokens], head[:, columns]
            logits = _product(x_part, head_part, memory)
            pull_back(logits, tokens, columns)
            _add_product(dx_sum[tokens], logits, head_part.T, first=columns.start == 0)
            _add_product(dhead_sum[:, columns], x_part.T, logits, first=tokens.start == 0)
    for total, result in ((dx_sum, dx), (dhead_sum, dhead)):
        if total is not result:
            result.copy_(total)
    return dx.view(x.shape), dhead if chunks[0] else dhead.zero_()


def _memory(x: Tensor, chunks: Chunks) -> Tensor:
    """Memory that can hold the logits of any chunk."""
    tokens, columns = (max((part.stop - part.start for part in parts), default=0) for parts in chunks)
    return torch.empty(tokens * columns, dtype=x.dtype, device=x.device)


def _product(a: Tensor, b: Tensor, memory: Tensor) -> Tensor:
    """`a @ b`, written into `memory`."""
    return torch.mm(a, b, out=memory[: a.shape[0] * b.shape[1]].view(a.shape[0], b.shape[1]))


def _sum_of(x: Tensor, num_terms: int) -> Tensor:
    """Where the terms of `x` are summed: in `x` itself, or in a float32 tensor if there are several terms and `x` is narrow."""
    if num_terms <= 1 or x.dtype == torch.float32:
        return x
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """`total += a @ b`, or if `first` `total = a @ b`. Into a float32 `total` the product goes without being rounded to less."""
    wide = total.dtype
    if wide == a.dtype or total.device.type != "cuda":  # `out_dtype` exists on CUDA alone
        a, b = a.to(wide), b.to(wide)
        if first:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif first:
        torch.mm(a, b, out_dtype=wide, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=wide, out=total)
