"""AdamW of many tensors in one launch, and in a second one those whose sizes or addresses are no multiples of 16.

Bandwidth-bound: each element is read and written once, 26 bytes with a bfloat16 gradient.

A table on the device says where the tensors are; a second one says which block of which tensor each Triton program updates. Both
are made when the kernel is first called with these tensors, and then kept, so that later calls copy nothing from the host. While
a CUDA graph is recorded nothing can be copied from the host: a small kernel then writes the addresses into the first table.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._catalogue import updates
from mpar.kernels._launch import capturing, launch, tuned
from mpar.kernels._table import Tuning

__all__ = ["adamw_many"]

NOTE = Tuning({}, num_warps=1)
COLUMNS = 6
"""Columns of the table of tensors: addresses of param, gradient, m, v and copy (or 0), and the number of elements."""


@triton.jit
def _pointer(table_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(  # one variant for each dtype: a graph that is recorded can load no other
    do_not_specialize=["row", "size"],
    do_not_specialize_on_alignment=["table_ptr", "param_ptr", "grad_ptr", "m_ptr", "v_ptr", "copy_ptr"],
)
def _note(table_ptr, row, param_ptr, grad_ptr, m_ptr, v_ptr, copy_ptr, size):
    table_ptr += row * 6
    tl.store(table_ptr, param_ptr.to(tl.int64))
    tl.store(table_ptr + 1, grad_ptr.to(tl.int64))
    tl.store(table_ptr + 2, m_ptr.to(tl.int64))
    tl.store(table_ptr + 3, v_ptr.to(tl.int64))
    if copy_ptr is not None:
        tl.store(table_ptr + 4, copy_ptr.to(tl.int64))
    tl.store(table_ptr + 5, size)


@triton.jit
def _adamw(
    table_ptr,  # (tensors, 6) int64
    chunks_ptr,  # (programs, 2) int32: tensor, block within it
    lr_ptr,
    step_ptr,
    scale_ptr,
    skip_ptr,  # or None
    beta1,
    beta2,
    rest1,  # 1 - beta1
    rest2,
    log_beta1,
    log_beta2,
    eps,
    weight_decay,
    GRAD: tl.constexpr,  # dtypes of gradients and copies; no COPY: there are none
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,  # all addresses and sizes are multiples of 16
    BLOCK: tl.constexpr,
):
    chunk = chunks_ptr + 2 * tl.program_id(0).to(tl.int64)
    table_ptr += tl.load(chunk).to(tl.int64) * 6
    offsets = tl.load(chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(table_ptr + 5)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    inside = offsets < size
    param_ptr = _pointer(table_ptr, 0, tl.float32, ALIGNED)
    param = tl.load(param_ptr + offsets, mask=inside, other=0.0)
    skip = False
    if skip_ptr is not None:
        skip = tl.load(skip_ptr) != 0
    if not skip:
        # float64, as the op says: 1 - beta^step loses digits at the first steps, lr weight_decay would be rounded away beside 1
        lr, step = tl.load(lr_ptr).to(tl.float64), tl.load(step_ptr).to(tl.float64)
        correction1 = 1 - tl.exp(step * log_beta1)
        correction2 = 1 - tl.exp(step * log_beta2)
        rate = (lr / correction1).to(tl.float32)
        inverse2 = (1 / correction2).to(tl.float32)
        decay = (1 - lr * weight_decay).to(tl.float32)
        m_ptr = _pointer(table_ptr, 2, tl.float32, ALIGNED)
        v_ptr = _pointer(table_ptr, 3, tl.float32, ALIGNED)
        grad = tl.load(_pointer(table_ptr, 1, GRAD, ALIGNED) + offsets, mask=inside, other=0.0).to(tl.float32)
        grad *= tl.load(scale_ptr).to(tl.float32)
        m = tl.load(m_ptr + offsets, mask=inside, other=0.0) * beta1 + grad * rest1
        v = tl.load(v_ptr + offsets, mask=inside, other=0.0) * beta2 + grad * grad * rest2
        param = param * decay - rate * (m / (tl.sqrt(v * inverse2) + eps))
        tl.store(param_ptr + offsets, param, mask=inside)
        tl.store(m_ptr + offsets, m, mask=inside)
        tl.store(v_ptr + offsets, v, mask=inside)
    if COPY is not None:
        tl.store(_pointer(table_ptr, 4, COPY, ALIGNED) + offsets, param.to(COPY), mask=inside)


def adamw_many(
    params: list[Tensor],
    grads: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    copies: list[Tensor],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """See `mpar.ops.adamw_many`; gradients are not changed."""
    reason = updates("", params, grads, ms, vs, lr, step, scale, skip, copies)
    if reason is not None:
        raise KernelError(f"adamw_many: {reason}")
    hyper = (beta1, beta2, 1 - beta1, 1 - beta2, _log(beta1), _log(beta2), eps, weight_decay)
    grads = [grad.contiguous() for grad in grads]
    groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, ...]]] = {}
    for tensors in zip(params, grads, ms, vs, *([copies] if copies else []), strict=True):
        aligned = tensors[0].numel() % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)
        if tensors[0].numel():
            groups.setdefault((tensors[1].dtype, aligned), []).append(tensors)
    for (_, aligned), rows in groups.items():
        _launch(list(zip(*rows, strict=True)), aligned, (lr, step, scale, skip), hyper)
    return list(params), list(ms), list(vs), list(copies)


def _launch(
    columns: list[tuple[Tensor, ...]], aligned: bool, scalars: tuple[Tensor | None, ...], hyper: tuple[float, ...]
) -> None:
    """Update tensors of one alignment and dtype of gradients in one launch. `columns`: params, grads, ms, vs, perhaps copies."""
    on = columns[0][0]
    entry = tuned("adamw", on)
    sizes = tuple(x.numel() for x in columns[0])
    chunks = _chunks(on.device, sizes, entry.blocks["BLOCK"])
    if capturing(on):
        table = torch.empty(len(sizes), COLUMNS, dtype=torch.int64, device=on.device)
        for row, tensors in enumerate(zip(*columns, strict=True)):
            copy = tensors[4] if len(tensors) > 4 else None
            launch(_note, (1,), table, row, *tensors[:4], copy, sizes[row], on=on, tuning=NOTE)
    elif on.device.type == "meta":
        table = torch.empty(len(sizes), COLUMNS, dtype=torch.int64, device="meta")
    else:
        table = _addresses(on.device, tuple(tuple(x.data_ptr() for x in column) for column in columns), sizes)
        _load_note(on.device, columns[1][0].dtype, columns[4][0].dtype if len(columns) > 4 else None)
    constants = {
        "GRAD": _DTYPES[columns[1][0].dtype],
        "COPY": _DTYPES[columns[4][0].dtype] if len(columns) > 4 else None,
        "ALIGNED": aligned,
    }
    launch(_adamw, (chunks.shape[0],), table, chunks, *scalars, *hyper, on=on, tuning=entry, **constants)


@functools.lru_cache(maxsize=1024)
def _addresses(device: torch.device, addresses: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """The table of tensors: a row for each tensor, with the addresses and the size that COLUMNS lists."""
    columns = [*addresses, *([(0,) * len(sizes)] * (COLUMNS - 1 - len(addresses))), sizes]
    return torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)


@functools.cache
def _load_note(device: torch.device, grad: torch.dtype, copy: torch.dtype | None) -> None:
    """Compile and load the kernel that writes addresses, before a CUDA graph is recorded that needs it."""
    table, wide = torch.empty(1, COLUMNS, dtype=torch.int64, device=device), torch.empty(1, device=device)
    copied = None if copy is None else wide.to(copy)
    launch(_note, (1,), table, 0, wide, wide.to(grad), wide, wide, copied, 1, on=wide, tuning=NOTE)


@functools.cache  # without a limit, since recorded graphs go on reading these tables
def _chunks(device: torch.device, sizes: Sequence[int], block: int) -> Tensor:
    """The table of Triton programs: which tensor each one updates, and which block of it."""
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    within = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([tensor, within], 1).to(torch.int32).to(device)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
