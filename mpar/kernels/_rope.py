"""RoPE: a Triton program turns all heads of one token, of one tensor or of two, such as queries and keys.

Bandwidth-bound: each element is read and written once; the tables are read once for each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpar.kernels._launch import launch, tuned

__all__ = ["rope", "rope_many"]


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    cos,
    sin,
    N,
    x_stride,
    y_stride,
    H: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn the first 2 HALF features of every head at `x_ptr`; copy REST (a power of two, or 0) or fewer features after them."""
    pairs = tl.arange(0, WIDTH)[None, :]
    for first in range(0, N, HEADS):
        heads = first + tl.arange(0, HEADS)[:, None]
        here = heads < N
        x = x_ptr + heads.to(tl.int64) * x_stride
        y = y_ptr + heads.to(tl.int64) * y_stride
        if INTERLEAVED:
            both = tl.arange(0, 2 * WIDTH)[None, :]
            inside = here & (both < 2 * HALF)
            pair = tl.load(x + both, mask=inside, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(pair, [HEADS, WIDTH, 2]))
            turned = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), [HEADS, 2 * WIDTH])
            tl.store(y + both, turned.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            inside = here & (pairs < HALF)
            x1 = tl.load(x + pairs, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(x + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + pairs, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(y + HALF + pairs, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=inside)
        if REST:
            rest = 2 * HALF + tl.arange(0, REST)[None, :]
            inside = here & (rest < H)
            tl.store(y + rest, tl.load(x + rest, mask=inside, other=0.0), mask=inside)


@triton.jit
def _rope(
    x_ptr,
    y_ptr,
    other_ptr,  # or None: a second tensor
    other_y_ptr,
    cos_ptr,
    sin_ptr,
    S,
    N,
    other_N,
    x_stride_B,
    x_stride_S,
    x_stride_N,
    y_stride_B,
    y_stride_S,
    y_stride_N,
    other_stride_B,
    other_stride_S,
    other_stride_N,
    other_y_stride_B,
    other_y_stride_S,
    other_y_stride_N,
    cos_stride_B,
    cos_stride_S,
    sin_stride_B,
    sin_stride_S,
    H: tl.constexpr,
    OTHER_H: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    OTHER_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0)
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    pairs = tl.arange(0, WIDTH)[None, :]
    cos = tl.load(cos_ptr + b * cos_stride_B + s * cos_stride_S + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(sin_ptr + b * sin_stride_B + s * sin_stride_S + pairs, mask=pairs < HALF, other=0.0)
    x = x_ptr + b * x_stride_B + s * x_stride_S
    y = y_ptr + b * y_stride_B + s * y_stride_S
    _turn(x, y, cos, sin, N, x_stride_N, y_stride_N, H, HALF, WIDTH, REST, INTERLEAVED, HEADS)
    if other_ptr is not None:
        x = other_ptr + b * other_stride_B + s * other_stride_S
        y = other_y_ptr + b * other_y_stride_B + s * other_y_stride_S
        _turn(x, y, cos, sin, other_N, other_stride_N, other_y_stride_N, OTHER_H, HALF, WIDTH, OTHER_REST, INTERLEAVED, HEADS)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """See `mpar.ops.rope`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    _launch(((x, y),), cos, sin, interleaved)
    return y


def rope_many(xs: list[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> list[Tensor]:
    """`rope` of tensors that share tables, in place, two in each launch; see `mpar.ops.rope_many`."""
    for first in range(0, len(xs), 2):
        _launch(tuple((x, x) for x in xs[first : first + 2]), cos, sin, interleaved)
    return list(xs)


def _launch(pairs: tuple[tuple[Tensor, Tensor], ...], cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn one or two tensors of the same batch and sequence; `pairs` has the operand and the result of each."""
    pairs = tuple(pair for pair in pairs if pair[0].numel())
    if not pairs:
        return
    x = pairs[0][0]
    half, width = cos.shape[-1], max(1, triton.next_power_of_2(cos.shape[-1]))
    tables = [table if half <= 1 or table.stride(-1) == 1 else table.contiguous() for table in (cos, sin)]
    operands: list[Tensor | None] = []
    heads, strides, sizes, rests = [], [], [], []
    for operand, result in pairs:
        operands += [operand, result]
        heads.append(operand.shape[2])
        strides += [*operand.stride()[:3], *result.stride()[:3]]
        sizes.append(operand.shape[3])
        rests.append(_rest(operand, result, half))
    missing = 2 - len(pairs)
    operands += [None, None] * missing
    strides += [0] * 6 * missing
    strides += [stride for table in tables for stride in (table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))]
    (size, other_size), (rest, other_rest) = (*sizes, 0)[:2], (*rests, 0)[:2]
    constants = {"H": size, "OTHER_H": other_size, "REST": rest, "OTHER_REST": other_rest}
    constants |= {"HALF": half, "WIDTH": width, "INTERLEAVED": interleaved}
    numbers = (x.shape[1], *(*heads, 0)[:2], *strides)
    entry = tuned("rope", x, str(max(16, width)))
    launch(_rope, (x.shape[0] * x.shape[1],), *operands, *tables, *numbers, on=x, tuning=entry, **constants)


def _rest(x: Tensor, y: Tensor, half: int) -> int:
    """The size of the block by which features that are not turned are copied; 0 if there are none, or `y` is `x`."""
    return 0 if x is y or x.shape[3] == 2 * half else triton.next_power_of_2(x.shape[3] - 2 * half)
