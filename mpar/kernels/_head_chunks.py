"""Chunks of x @ head: how much of the logits is made at once, and what memory that takes. It needs no Triton.

A chunk is at most BUDGET bytes of logits, or MIN_TOKENS tokens' where these are more, but never more than `chunk` tokens'.
Going back with log-sum-exps that are known, a chunk is all tokens' logits of a part of the vocabulary, if tokens are fewer than
columns: what then adds up over chunks is the gradient of x, which is smaller than that of the head by the same ratio.
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
"""Bytes of logits: enough tokens for matrix products to be fast, few enough to be small beside a model."""
MIN_TOKENS = 1024
"""With fewer, products wait for memory."""
TILE = 128
"""Rows and columns of a chunk are whole tiles of a matrix product, where it is not smaller than one."""

Chunks = tuple[list[slice], list[slice]]
"""Slices of tokens and of columns; each pair of them is a chunk, and one of the two lists has at most one slice."""


def forward_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks with all columns, of which each row's statistics are made."""
    return _parts(_num_tokens(x), _tokens_at_once(x, head, chunk)), [slice(0, head.shape[1])]


def backward_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks whose log-sum-exps are known."""
    num_tokens, num_columns = _num_tokens(x), head.shape[1]
    tokens_at_once = _tokens_at_once(x, head, chunk)
    if num_tokens > num_columns or tokens_at_once * num_columns < num_tokens:
        return forward_chunks(x, head, chunk)
    return [slice(0, num_tokens)][:num_tokens], _parts(num_columns, tokens_at_once * num_columns // max(num_tokens, 1))


def grad_chunks(x: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Chunks with all columns; one, where that takes no more memory than the float32 sum which several would need."""
    num_tokens, wide = _num_tokens(x), _sum_bytes(head)
    if chunk >= num_tokens and num_tokens * head.shape[1] * x.element_size() <= BUDGET + wide:
        return [slice(0, num_tokens)][:num_tokens], [slice(0, head.shape[1])]
    return forward_chunks(x, head, chunk)


def forward_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """Bytes of a chunk's logits going forward."""
    return _logits_bytes(x, forward_chunks(x, head, chunk))


def backward_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """Bytes of a chunk's logits and of sums over chunks going back."""
    return _workspace(x, head, backward_chunks(x, head, chunk))


def grad_workspace(x: Tensor, head: Tensor, *_: object, chunk: int, **__: object) -> int:
    """The same for loss and gradients at once."""
    return _workspace(x, head, grad_chunks(x, head, chunk))


def _workspace(x: Tensor, head: Tensor, chunks: Chunks) -> int:
    tokens, columns = chunks
    sums = (len(columns) > 1) * _sum_bytes(x) + (len(tokens) > 1) * _sum_bytes(head)
    return _logits_bytes(x, chunks) + sums


def _logits_bytes(x: Tensor, chunks: Chunks) -> int:
    tokens, columns = (max((part.stop - part.start for part in parts), default=0) for parts in chunks)
    return tokens * columns * x.element_size()


def _sum_bytes(operand: Tensor) -> int:
    """Bytes of a float32 sum beside the gradient itself."""
    return 0 if operand.dtype == torch.float32 else 4 * operand.numel()


def _num_tokens(x: Tensor) -> int:
    return x.shape[:-1].numel()


def _tokens_at_once(x: Tensor, head: Tensor, chunk: int) -> int:
    """Tokens whose logits are the memory of a chunk."""
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
