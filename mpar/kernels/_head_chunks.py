"""Chunks of x @ head: how many logits are made at once, and how much memory that takes. This module needs no Triton.

A chunk is the logits of as many tokens as fit into BUDGET bytes; of MIN_TOKENS tokens, if those are more; but never of more than
`chunk` tokens. In a backward whose log-sum-exps are known, and with no more tokens than columns, a chunk is instead the logits of
all tokens in a part of the vocabulary. The sum over chunks is then the gradient of x, which is smaller than that of the head by
the ratio of tokens to columns.
"""


import torch
from torch import Tensor

__all__ = [
    "Chunks",
    "backward_chunks",
    "backward_workspace",
    "forward_chunks",
    "forward_workspace",
    "grad_chunks",
    "grad_workspace",
]

BUDGET = 1 << 29
"""Bytes of the logits of a chunk: enough tokens for matrix products to be fast, but little memory beside that of a model."""
MIN_TOKENS = 1024
"""With fewer tokens, matrix products would wait for memory."""
TILE = 128
"""Chunks of at least so many rows or columns are cut at multiples of it, so that they are whole tiles of a matrix product."""

Chunks = tuple[list[slice], list[slice]]
"""Slices of tokens, and slices of columns. Every pair of them is a chunk. One of the two lists has at most one slice."""


def forward_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks with all columns, from which the statistics of each row are computed."""
    return _parts(_num_tokens(x), _tokens_at_once(x, head, chunk)), [slice(0, head.shape[1])]


def backward_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks for gradients of a loss whose log-sum-exps are known."""
    num_tokens, num_columns = _num_tokens(x), head.shape[1]
    tokens_at_once = _tokens_at_once(x, head, chunk)
    if num_tokens > num_columns or tokens_at_once * num_columns < num_tokens:
        return forward_chunks(x, head, chunk)
    return [slice(0, num_tokens)][:num_tokens], _parts(num_columns, tokens_at_once * num_columns // max(num_tokens, 1))


def grad_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks with all columns. A single one, if it takes at most BUDGET bytes besides the float32 sum that several would need."""
    num_tokens, wide = _num_tokens(x), _sum_bytes(head)
    if chunk >= num_tokens and num_tokens * head.shape[1] * x.element_size() <= BUDGET + wide:
        return [slice(0, num_tokens)][:num_tokens], [slice(0, head.shape[1])]
    return forward_chunks(x, head, chunk)


def forward_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """Bytes of the logits of one chunk in the forward."""
    return _logits_bytes(x, forward_chunks(x, head, chunk))


def backward_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """Bytes of the logits of one chunk, and of sums over chunks, in the backward."""
    return _workspace(x, head, backward_chunks(x, head, chunk))


def grad_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """The same where loss and gradients are computed together."""
    return _workspace(x, head, grad_chunks(x, head, chunk))


def _workspace(x: Tensor, head: Tensor, chunks: Chunks) -> int:
    tokens, columns = chunks
    sums = (len(columns) > 1) * _sum_bytes(x) + (len(tokens) > 1) * _sum_bytes(head)
    return _logits_bytes(x, chunks) + sums


def _logits_bytes(x: Tensor, chunks: Chunks) -> int:
    tokens, columns = (max((part.stop - part.start for part in parts), default=0) for parts in chunks)
    return tokens * columns * x.element_size()


def _sum_bytes(operand: Tensor) -> int:
    """Bytes of a float32 sum beside the gradient of `operand`; 0 if that gradient is in float32 itself."""
    return 0 if operand.dtype == torch.float32 else 4 * operand.numel()


def _num_tokens(x: Tensor) -> int:
    return x.shape[:-1].numel()


def _tokens_at_once(x: Tensor, head: Tensor, chunk: int) -> int:
    """The number of tokens whose logits, over all columns, fill the memory of a chunk."""
    return min(chunk, max(BUDGET // (head.shape[1] * x.element_size()), MIN_TOKENS))


def _parts(size: int, at_once: int) -> list[slice]:
    """[0, size) in the fewest parts of at most `at_once`, as equal as whole tiles allow."""
    if at_once >= size:
        return [slice(0, size)][:size]
    tile = TILE if at_once >= TILE else 1
    at_once = at_once // tile * tile
    num_parts = -(-size // at_once)
    step = -(-size // (num_parts * tile)) * tile
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]
