"""AdamW of many tensors in one launch, or two if there are odd sizes or addresses, which do not hinder the others.

Bandwidth-bound: each element is read and written once, 26 bytes with a bfloat16 gradient.

A table on the device says where the tensors are, a second which block of which tensor a program has. Both are made when these
tensors come for the first time and then kept, so that a steady state copies nothing from the host.
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
from mpar.kernels._launch import arch_of, launch, tuned

__all__ = ["adamw_many"]

COLUMNS = 6
"""Of the table of tensors: addresses of param, gradient, m, v, copy (or 0), and the number of elements."""


@triton.jit
def _pointer(table_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


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
    """See `mpar.ops.adamw_many`; gradients stay as they are."""
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
    """One launch for tensors of one alignment and dtype of gradients: params, grads, ms, vs and perhaps copies."""
    on = columns[0][0]
    entry = tuned("adamw", on)
    sizes = tuple(x.numel() for x in columns[0])
    if on.device.type == "meta":
        addresses: tuple[tuple[int, ...], ...] = tuple((0,) * len(sizes) for _ in columns)
        table, chunks = _tables.__wrapped__(arch_of(on), on.device, addresses, sizes, entry.blocks["BLOCK"])
    else:
        addresses = tuple(tuple(x.data_ptr() for x in column) for column in columns)
        table, chunks = _tables(arch_of(on), on.device, addresses, sizes, entry.blocks["BLOCK"])
    constants = {
        "GRAD": _DTYPES[columns[1][0].dtype],
        "COPY": _DTYPES[columns[4][0].dtype] if len(columns) > 4 else None,
        "ALIGNED": aligned,
    }
    launch(_adamw, (chunks.shape[0],), table, chunks, *scalars, *hyper, on=on, tuning=entry, **constants)


@functools.lru_cache(maxsize=1024)
def _tables(
    arch: str, device: torch.device, addresses: Sequence[Sequence[int]], sizes: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    """`(table of tensors, table of programs)` on `device`: what a program looks up."""
    columns = [*addresses, *([(0,) * len(sizes)] * (COLUMNS - 1 - len(addresses))), sizes]
    table = torch.tensor(columns, dtype=torch.int64).T.contiguous()
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    within = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return table.to(device), torch.stack([tensor, within], 1).to(torch.int32).to(device)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
