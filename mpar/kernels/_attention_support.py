"""Which calls attention's kernels support, and in words why not the others. This module needs no Triton."""

import torch
from torch import Tensor

__all__ = ["attention_bwd_workspace", "attention_supports", "merge_supports", "scores_bwd_workspace", "scores_workspace"]

HEADS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Pairs of head sizes: of q and k, and of v. Tiles are powers of two wide, so 192 is loaded as 128 and 64."""
MERGED = (64, 128, 256)
"""Head sizes (of v) for which partial results can be merged."""
PADDING = 128
"""Rows of lse and delta are padded to a multiple of this number, which the size of every tile of queries divides."""
DTYPES = (torch.float16, torch.bfloat16)
MERGED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention_supports(arch: str, q: Tensor, k: Tensor, v: Tensor, *_: object, scale: float, **params: object) -> str | None:
    """Why the kernels of attention and of its gradient cannot carry out this call; None if they can."""
    if q.dtype not in DTYPES:  # products of float32 tiles leave no registers, neither as one product nor as three of tf32
        return f"{q.dtype}: kernels take {' and '.join(map(str, DTYPES))}"
    if (q.shape[3], v.shape[3]) not in HEADS:
        known = ", ".join(f"{size} and {size_v}" for size, size_v in HEADS)
        return f"head sizes {q.shape[3]} of q and {v.shape[3]} of v: kernels have {known}"
    if not scale > 0:
        return f"scale {scale}: kernels take the maximum before they scale, so it must be positive"
    return None


def attention_bwd_workspace(q: Tensor, *others: object, **params: object) -> int:
    """Bytes of two float32 numbers for each query of each head, where queries are padded to whole tiles."""
    B, S, N = q.shape[:3]
    return 2 * 4 * B * N * (-(-S // PADDING) * PADDING)


def scores_workspace(q: Tensor, k: Tensor, *others: object, **params: object) -> int:
    """Bytes that the reference holds on a GPU: the scores of one batch row, and the exponentials for their log-sum-exp."""
    return 2 * q.shape[1:3].numel() * k.shape[1] * max(4, q.element_size())


def scores_bwd_workspace(q: Tensor, k: Tensor, *others: object, **params: object) -> int:
    """The same for its gradient: scores, gradients of the probabilities, and a third such tensor while they are multiplied."""
    return scores_workspace(q, k) * 3 // 2


def merge_supports(arch: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, *_: object, **params: object) -> str | None:
    """Why the kernels that merge partial results cannot carry out this call; None if they can."""
    wrong = {out_a.dtype, out_b.dtype} - set(MERGED_DTYPES) | {lse_a.dtype} - {torch.float32}
    if wrong:
        return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}"
    size = out_a.shape[3]
    return None if size in MERGED else f"head size {size}: kernels have {', '.join(map(str, MERGED))}"
