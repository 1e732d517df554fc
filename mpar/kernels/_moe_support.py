"""What the kernels of mixtures of experts support, in words. Needs no Triton."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["expert_order_supports", "floats", "grouped_matmul_supports", "grouped_mm_supports", "router_supports", "rows_support"]

MAX_EXPERTS = 1024
MAX_CHOSEN = 32
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def floats(*operands: Tensor | None) -> str | None:
    """All floating operands are float32, float16 or bfloat16."""
    wrong = {x.dtype for x in operands if x is not None and x.is_floating_point()} - set(FLOATS)
    return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}" if wrong else None


def _few(what: str, number: int, most: int) -> str | None:
    return f"{number} {what}: kernels have room for {most}" if number > most else None


def router_supports(arch: str, logits: Tensor, *others: Tensor | None, k: int, **_: Any) -> str | None:
    """Of `topk_router` and its gradient."""
    return floats(logits, *others) or _few("experts", logits.shape[1], MAX_EXPERTS) or _few("experts per token", k, MAX_CHOSEN)


def expert_order_supports(arch: str, experts: Tensor, *, num_experts: int) -> str | None:
    """Of `expert_order`."""
    return _few("experts", num_experts, MAX_EXPERTS)


def rows_support(arch: str, rows: Tensor, inverse: Tensor, *others: Tensor | None) -> str | None:
    """Of `permute`, `unpermute` and its gradient."""
    return floats(rows, *others) or _few("rows per token", inverse.shape[1], MAX_CHOSEN)


def _aligned(**sizes: int) -> str | None:
    wrong = [f"{name} of {size} bytes" for name, size in sizes.items() if size % 16]
    return f"{' and '.join(wrong)}: descriptors load rows of a multiple of 16 bytes" if wrong else None


def grouped_matmul_supports(arch: str, x: Tensor, other: Tensor, offsets: Tensor, **_: Any) -> str | None:
    """Of `grouped_matmul` (x, w) and its gradient (x, dy) by Triton."""
    size = x.element_size()
    num_experts = other.shape[0] if other.ndim == 3 else offsets.shape[0]
    reason = floats(x, other) or _few("experts", num_experts, MAX_EXPERTS)
    return reason or _aligned(**{"rows of x": x.shape[1] * size, "rows of the other operand": other.shape[-1] * size})


def grouped_mm_supports(
    arch: str, x: Tensor, other: Tensor, offsets: Tensor, *, start: int, num_experts: int | None = None
) -> str | None:
    """Of the same by torch's grouped product."""
    if x.dtype != torch.bfloat16 or arch == "sm_80":
        return f"{x.dtype} on {arch}: torch's grouped product is for bfloat16 from sm_90 on"
    here = num_experts if num_experts is not None else other.shape[0]
    if not isinstance(start, int) or start != 0 or here != offsets.shape[0]:
        return "only a part of the experts is here: torch's grouped product takes all"
    return grouped_matmul_supports(arch, x, other, offsets)
