"""What the kernels of mixtures of experts support, in words. Needs no Triton."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["expert_order_supports", "floats", "router_supports", "rows_support"]

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
