"""Which calls the kernels of mixtures of experts support, and in words why not the others. This module needs no Triton."""

import torch
from torch import Tensor

__all__ = [
    "expert_order_supports",
    "expert_order_workspace",
    "floats",
    "grouped_matmul_dw_workspace",
    "grouped_matmul_supports",
    "grouped_matmul_workspace",
    "grouped_mm_supports",
    "loadable",
    "router_supports",
    "rows_support",
]

MAX_EXPERTS = 1024
MAX_CHOSEN = 32
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def floats(*operands: Tensor | None) -> str | None:
    """None if all floating operands are float32, float16 or bfloat16; else why not."""
    wrong = {x.dtype for x in operands if x is not None and x.is_floating_point()} - set(FLOATS)
    return f"kernels compute in float32 and take no {', '.join(sorted(map(str, wrong)))}" if wrong else None


def _few(what: str, number: int, most: int) -> str | None:
    return f"{number} {what}: kernels have room for {most}" if number > most else None


def router_supports(arch: str, logits: Tensor, *others: Tensor | None, k: int, **_: object) -> str | None:
    """Why the kernels of `topk_router` and its gradient cannot carry out this call; None if they can."""
    return floats(logits, *others) or _few("experts", logits.shape[-1], MAX_EXPERTS) or _few("experts per token", k, MAX_CHOSEN)


def expert_order_supports(arch: str, experts: Tensor, *, num_experts: int) -> str | None:
    """Why the kernels of `expert_order` cannot carry out this call; None if they can."""
    return _few("experts", num_experts, MAX_EXPERTS)


def rows_support(arch: str, rows: Tensor, inverse: Tensor, *others: Tensor | None) -> str | None:
    """Why the kernels of `permute`, `unpermute` and its gradient cannot carry out this call; None if they can."""
    return floats(rows, *others) or _few("rows per token", inverse.shape[1], MAX_CHOSEN)


def _aligned(**sizes: int) -> str | None:
    wrong = [f"{name} of {size} bytes" for name, size in sizes.items() if size % 16]
    return f"{' and '.join(wrong)}: descriptors load rows of a multiple of 16 bytes" if wrong else None


def grouped_matmul_supports(arch: str, x: Tensor, other: Tensor, offsets: Tensor) -> str | None:
    """Why Triton's kernels cannot carry out `grouped_matmul` (x, w) or its gradient (x, dy); None if they can."""
    size = x.element_size()
    reason = floats(x, other) or _few("experts", offsets.shape[0], MAX_EXPERTS)
    return reason or _aligned(**{"rows of x": x.shape[1] * size, "rows of the other operand": other.shape[-1] * size})


def grouped_mm_supports(arch: str, x: Tensor, other: Tensor, offsets: Tensor) -> str | None:
    """Why torch's grouped product cannot carry out the same calls; None if it can."""
    if x.dtype != torch.bfloat16 or arch == "sm_80":
        return f"{x.dtype} on {arch}: torch's grouped product is for bfloat16 from sm_90 on"
    return grouped_matmul_supports(arch, x, other, offsets)


def loadable(x: Tensor) -> Tensor:
    """`x` itself if descriptors can load it (last dim contiguous, rows and base at multiples of 16 bytes), else a copy."""
    size = x.element_size()
    steps = all(step and step * size % 16 == 0 for step in x.stride()[:-1])
    aligned = x.stride(-1) == 1 and steps and x.storage_offset() * size % 16 == 0 and x.data_ptr() % 16 == 0  # 0 if no data
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def expert_order_workspace(experts: Tensor, *, num_experts: int) -> int:
    """Bytes of the counts of every expert in every chunk of 1024 slots, and of the first row of every expert."""
    bins = max(32, 1 << num_experts.bit_length())
    return 4 * bins * (-(-experts.numel() // 1024) + 1)


def grouped_matmul_workspace(x: Tensor, w: Tensor, offsets: Tensor) -> int:
    """Bytes of three numbers for each tile (of at least 64 rows), and of copies of operands that descriptors cannot load."""
    stored = w.transpose(1, 2) if w.stride(2) != 1 and w.stride(1) == 1 else w
    return 12 * (x.shape[0] // 64 + w.shape[0] + 1) + _copies(x, stored)


def grouped_matmul_dw_workspace(x: Tensor, dy: Tensor, offsets: Tensor) -> int:
    """Bytes of copies of operands that descriptors cannot load."""
    return _copies(x, dy)


def _copies(*operands: Tensor) -> int:
    return sum(x.nbytes for x in operands if loadable(x) is not x)
