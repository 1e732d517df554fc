"""What attention's kernels support, in words; needs no Triton."""

import torch
from torch import Tensor

__all__ = ["attention_bwd_workspace", "attention_supports", "merge_supports", "scores_bwd_workspace", "scores_workspace"]

HEADS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Head sizes of q and k, and of v: tiles are powers of two, and 192 is 128 and 64."""
MERGED = (64, 128, 256)
"""Head sizes of partial results that are merged: those of v."""
PADDING = 128
"""Rows of lse and delta are padded to a multiple of this, which every tile of queries divides."""
DTYPES = (torch.float16, torch.bfloat16)
MERGED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention_supports(arch: str, q: Tensor, k: Tensor, v: Tensor, *_: object, scale: float, **params: object) -> str | None:
    """Why the kernels of attention and of its gradient cannot do this, or None."""
    if q.dtype not in DTYPES:  # products of float32 tiles leave no registers, in one pass or in three of tf32
        return f"{q.dtype}: kernels take {' and '.join(map(str, DTYPES))}"
    if (q.shape[3], v.shape[3]) not in HEADS:
        known = ", ".join(f"{size} and {size_v}" for size, size_v in HEADS)
        return f"head sizes {q.shape[3]} of q and {v.shape[3]} of v: kernels have {known}"
    if not scale > 0:
        return f"scale {scale}: kernels take the maximum before they scale, so it must be positive"
    return None


def attention_bwd_workspace(q: Tensor, *others: object, **params: object) -> int:
    """Two numbers in float32 for each row of a head, padded to tiles."""
    B, S, N = q.shape[:3]
    return 2 * 4 * B * N * (-(-S // PADDING) * PADDING)


def scores_workspace(q: Tensor, k: Tensor, *others: object, **params: object) -> int:
    """What the reference holds on a GPU: scores of one batch row, and exponentials for their log-sum-exp."""
    return 2 * q.shape[1:3].numel() * k.shape[1] * max(4, q.element_size())


def scores_bwd_workspace(q: Tensor, k: Tensor, *others: object, **params: object) -> int:
    """The same for its gradient: scores, probabilities' gradients, and one more while they are multiplied."""
    return scores_workspace(q, k) * 3 // 2


def merge_supports(arch: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, *_: object, **params: object) -> str | None:
    """Why the kernels that merge partial results cannot do this, or None."""
    wrong = {out_a.dtype, out_b.dtype} - set(MERGED_DTYPES) | {lse_a.dtype} - {torch.float32}
    if wrong:
        return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}"
    size = out_a.shape[3]
    return None if size in MERGED else f"head size {size}: kernels have {', '.join(map(str, MERGED))}"
