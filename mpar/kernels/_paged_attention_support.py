"""Which calls the kernels of paged attention support, and how they divide long rows. This module needs no Triton."""

import torch
from torch import Tensor

__all__ = ["ALIGNED", "paged_attention_supports", "paged_attention_workspace", "split_length"]

HEADS = {64: (64, 0), 128: (128, 0), 256: (256, 0), 576: (512, 64)}
"""Head sizes, each as a sum of two powers of two, since tiles are powers of two wide; 576 is that of DeepSeek's latents."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNED = 128
"""A part of a row has a multiple of this number of positions, which the size of every tile of keys divides."""
PROGRAMS = 512
"""About how many Triton programs a call should have: 3 to 5 for each multiprocessor of the chips in ARCHITECTURES."""
MAX_SPLITS = 64
"""Into how many parts a row is divided at most: the kernel that puts them together holds all of them in registers."""


def paged_attention_supports(arch: str, q: Tensor, k: Tensor, *_: object, scale: float, **params: object) -> str | None:
    """Why the kernels of paged attention cannot carry out this call; None if they can."""
    size = q.shape[3]
    if q.dtype not in DTYPES:
        return f"kernels compute in float32 and take no {q.dtype}"
    if size not in HEADS:
        return f"head size {size}: kernels have {', '.join(map(str, HEADS))}"
    if size > 256 and q.dtype == torch.float32:
        return f"head size {size} in float32: kernels have it in float16 and bfloat16"
    if not scale > 0:
        return f"scale {scale}: kernels take the maximum before they scale, so it must be positive"
    if q.shape[0] * q.shape[2] > 65535:
        return f"{q.shape[0] * q.shape[2]} heads of all groups: the grid of a kernel has at most 65535 along its second dim"
    return None


def split_length(q: Tensor, k: Tensor, pages: Tensor, page_size: int, window: int | None) -> tuple[int, int]:
    """`(length, number)` of the parts into which every row is divided, so that a chip is busy even with few tokens.

    It depends on shapes alone: what a token gets has the same bits whichever other tokens there are. At least a quarter of the
    tokens of a call is taken to be there, because steps are compiled for numbers of tokens that are at most four apart.
    """
    length = pages.shape[2] * page_size
    programs = q.shape[0] * k.shape[2] * -(-q.shape[1] // 4)
    seen = length if window is None else min(length, window)
    shortest = max(-(-seen // max(1, PROGRAMS // programs)), -(-length // MAX_SPLITS))
    split = -(-max(shortest, 2 * ALIGNED) // ALIGNED) * ALIGNED
    return split, max(1, -(-length // split))


def paged_attention_workspace(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor, pages: Tensor, *_: object,
    page_size: int, window: int | None, **params: object,
) -> int:  # fmt: skip
    """Bytes of the results of all parts of rows, in float32, and of their log-sum-exps."""
    number = split_length(q, k, pages, page_size, window)[1]
    return 0 if number == 1 else 4 * number * (q.numel() + q.shape[:3].numel())
