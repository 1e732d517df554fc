"""FP8: matrices of e4m3 numbers with a scale for each block, and the product of two such matrices.

The largest magnitude of a block gives its scale. Blocks of 1x128 and 128x128 are those of DeepSeek-V3 (arXiv:2412.19437, sec.
3.3.2).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError, UnknownNameError
from mpar.op_shape import MatmulShape
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = [
    "FP8_MAX",
    "FP8_SIDE",
    "FP8_SMALLEST_SCALE",
    "Block",
    "dequantise_fp8",
    "fp8_matmul",
    "fp8_scale_shape",
    "quantise_fp8",
    "quantise_fp8_both",
]

Block = Literal["tensor", "row", "1x128", "128x128"]
FP8_MAX = 448.0
"""The largest number of e4m3 (Micikevicius et al. 2022, arXiv:2209.05433, table 1)."""
FP8_SIDE = 128
FP8_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Smaller scales are not used."""

quantise_fp8_p = Primitive("quantise_fp8", "x -> q, scale", block="str")
quantise_fp8_both_p = Primitive("quantise_fp8_both", "x -> q, scale, qt, scale_t", block="str")
dequantise_fp8_p = Primitive("dequantise_fp8", "q, scale -> x", block="str", dtype="ScalarType")
fp8_matmul_p = Primitive("fp8_matmul", "a, a_scale, b, b_scale -> y", a_block="str", b_block="str", dtype="ScalarType")


def quantise_fp8(x_RC: Tensor, *, block: Block) -> tuple[Tensor, Tensor]:
    """`(q_RC, scale)` with `x = q * scale` up to rounding; q is float8_e4m3fn, scale float32 with one entry per block.

    Blocks and shapes of scale: "tensor" (1, 1); "row" (R, 1); "1x128" (R, C / 128); "128x128" (R / 128, C / 128), rounded up.
    scale is amax / 448, at least 2**-126, and 1 where the block is all zeros. Elements are multiplied by 1 / scale, limited to
    +-448 and rounded to nearest even. A block with an infinity or a NaN has scale NaN and is NaN everywhere. It has no gradient.
    Raises ShapeError unless `x_RC` has two dims, DtypeError unless it is floating, UnknownNameError for another block.
    """
    return quantise_fp8_p.bind(x_RC, block=block)


def quantise_fp8_both(x_RC: Tensor, *, block: Block) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(*quantise_fp8(x_RC), *quantise_fp8(x_RC.T))`, all contiguous: for the products of a layer and of its gradients."""
    return quantise_fp8_both_p.bind(x_RC, block=block)


def dequantise_fp8(q_RC: Tensor, scale: Tensor, *, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """`q * scale` in `dtype`, computed in float32 or wider. Raises ShapeError or DtypeError if they do not fit each other."""
    return dequantise_fp8_p.bind(q_RC, scale, block=block, dtype=dtype)


def fp8_matmul(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`y_MN`, the product of a and the transpose of b, both quantised, summed in float32; `dtype` is that of the result.

    K is the last dim of both operands, as the matrix units of Hopper need it. It has no gradient: gradients are products of
    operands that are quantised anew. Raises ShapeError, DtypeError or UnknownNameError if operands do not fit each other.
    """
    return fp8_matmul_p.bind(a_MK, a_scale, b_NK, b_scale, a_block=a_block, b_block=b_block, dtype=dtype)


def fp8_scale_shape(shape: tuple[int, int] | torch.Size, block: str) -> tuple[int, int]:
    """The shape of the scale: how many blocks a matrix of `shape` has along each dim. Raises UnknownNameError."""
    if block not in get_args(Block):
        raise UnknownNameError(f"no block of FP8 is called {block!r}; there are {', '.join(get_args(Block))}")
    rows, columns = shape
    if block == "tensor":
        return 1, 1
    if block == "row":
        return rows, 1
    return (rows if block == "1x128" else -(-rows // FP8_SIDE)), -(-columns // FP8_SIDE)


def _check_matrix(name: str, x: Tensor) -> None:
    if x.ndim != 2:
        raise ShapeError(f"{name}: x has shape {tuple(x.shape)}; it must have two dims: flatten the others into rows")
    if not x.is_floating_point():
        raise DtypeError(f"{name}: x has dtype {x.dtype}, needs a floating dtype")


def _check_quantised(name: str, q: Tensor, scale: Tensor, block: str) -> None:
    expected = fp8_scale_shape(q.shape, block) if q.ndim == 2 else None
    if tuple(scale.shape) != expected:
        wanted = "the first must have two dims" if expected is None else f"the second must be {expected} for blocks {block}"
        raise ShapeError(f"{name}: q is {tuple(q.shape)}, scale is {tuple(scale.shape)}; {wanted}")
    if q.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise DtypeError(f"{name}: q is {q.dtype}, scale is {scale.dtype}; they must be float8_e4m3fn and float32")


@quantise_fp8_p.def_abstract
def _abstract(x, *, block):
    _check_matrix("quantise_fp8", x)
    scale = torch.empty(fp8_scale_shape(x.shape, block), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), scale


@quantise_fp8_both_p.def_abstract
def _abstract_both(x, *, block):
    return *_abstract(x, block=block), *_abstract(x.T, block=block)


@dequantise_fp8_p.def_abstract
def _abstract_dequantise(q, scale, *, block, dtype):
    _check_quantised("dequantise_fp8", q, scale, block)
    return torch.empty(q.shape, dtype=dtype, device=q.device)


@fp8_matmul_p.def_abstract
def _abstract_matmul(a, a_scale, b, b_scale, *, a_block, b_block, dtype):
    _check_quantised("fp8_matmul: a", a, a_scale, a_block)
    _check_quantised("fp8_matmul: b", b, b_scale, b_block)
    if a.shape[1] != b.shape[1]:
        raise ShapeError(f"fp8_matmul: a is {tuple(a.shape)}, b is {tuple(b.shape)}; they must be (M, K) and (N, K)")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise DtypeError(f"fp8_matmul: the result cannot be {dtype}; use bfloat16, float16 or float32")
    return torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)


def _spread(per_block: Tensor, shape: torch.Size, block: str) -> Tensor:
    """The number of each block repeated for all its elements; a dim of size 1 may stay, because it broadcasts."""
    if block == "128x128":
        per_block = per_block.repeat_interleave(FP8_SIDE, 0)[: shape[0]]
    return per_block.repeat_interleave(FP8_SIDE, 1)[:, : shape[1]] if block in ("1x128", "128x128") else per_block


def _amax(size: Tensor, block: str) -> Tensor:
    rows, columns = fp8_scale_shape(size.shape, block)
    if not size.numel():
        return size.new_zeros(rows, columns)
    if block == "tensor":
        return size.amax().view(1, 1)
    if block == "row":
        return size.amax(1, keepdim=True)
    height = FP8_SIDE if block == "128x128" else 1
    padded = torch.nn.functional.pad(size, (0, columns * FP8_SIDE - size.shape[1], 0, rows * height - size.shape[0]))
    return padded.view(rows, height, columns, FP8_SIDE).amax((1, 3))


@quantise_fp8_p.def_impl
def _impl(x, *, block):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    amax = _amax(wide.abs(), block).to(torch.float32)
    scale = (amax / FP8_MAX).clamp(min=FP8_SMALLEST_SCALE)
    scale = scale.masked_fill(amax == 0, 1.0).masked_fill(~amax.isfinite(), torch.nan)
    q = (wide * _spread(scale.reciprocal(), x.shape, block)).clamp(-FP8_MAX, FP8_MAX)
    return q.to(torch.float8_e4m3fn).contiguous(), scale


@quantise_fp8_both_p.def_impl
def _impl_both(x, *, block):
    return *_impl(x, block=block), *_impl(x.T, block=block)


@dequantise_fp8_p.def_impl
def _impl_dequantise(q, scale, *, block, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    return (q.to(wide) * _spread(scale, q.shape, block).to(wide)).to(dtype).contiguous()


@fp8_matmul_p.def_impl
def _impl_matmul(a, a_scale, b, b_scale, *, a_block, b_block, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    a, b = (_impl_dequantise(q, s, block=c, dtype=wide) for q, s, c in ((a, a_scale, a_block), (b, b_scale, b_block)))
    return torch.mm(a, b.T).to(dtype)


def _factors(block: str, row: str, column: str) -> tuple[str, str]:
    """`(factors of a scale, factors that must not be sharded)`: rows may be sharded only if each has scales of its own."""
    if block in ("row", "1x128"):
        return f"{row} {column}s", column
    return f"{row}s {column}s", f"{row} {column}"


@quantise_fp8_p.def_sharding_from
def _sharding(*, block: str) -> ShardingRule:
    scale, replicated = _factors(block, "r", "c")
    return parse_sharding(f"r c -> r c, {scale}", need_replication=f"{replicated} {_units(scale)}")


@dequantise_fp8_p.def_sharding_from
def _sharding_dequantise(*, block: str, dtype: torch.dtype) -> ShardingRule:
    scale, replicated = _factors(block, "r", "c")
    return parse_sharding(f"r c, {scale} -> r c", need_replication=f"{replicated} {_units(scale)}")


@fp8_matmul_p.def_sharding_from
def _sharding_matmul(*, a_block: str, b_block: str, dtype: torch.dtype) -> ShardingRule:
    (a, a_replicated), (b, b_replicated) = _factors(a_block, "m", "k"), _factors(b_block, "n", "k")
    a, b = a.replace("ks", "ka"), b.replace("ks", "kb")
    return parse_sharding(f"m k, {a}, n k, {b} -> m n", need_replication=f"{a_replicated} {b_replicated} {_units(a)} {_units(b)}")


def _units(scale: str) -> str:
    return " ".join(name for name in scale.split() if len(name) > 1)


quantise_fp8_both_p.def_sharding("r c -> r c, rs cs, c r, ct rt", need_replication="r c rs cs ct rt")
for _primitive in (quantise_fp8_p, quantise_fp8_both_p, dequantise_fp8_p, fp8_matmul_p):
    _primitive.def_batching_loop()
quantise_fp8_p.def_cost(lambda x, *, block: Cost(flops=4 * x.numel(), bytes=x.nbytes + x.numel()))
quantise_fp8_both_p.def_cost(lambda x, *, block: Cost(flops=8 * x.numel(), bytes=x.nbytes + 2 * x.numel()))
dequantise_fp8_p.def_cost(lambda q, scale, *, block, dtype: Cost(flops=q.numel(), bytes=q.numel() * (1 + dtype.itemsize)))


@fp8_matmul_p.def_cost
def _cost_matmul(a, a_scale, b, b_scale, *, dtype, **_):
    result = a.shape[0] * b.shape[0]
    scales = a_scale.nbytes + b_scale.nbytes
    shape = MatmulShape(batch=1, m=a.shape[0], n=b.shape[0], k=a.shape[1])
    return Cost(flops=2 * result * a.shape[1], bytes=a.nbytes + b.nbytes + scales + result * dtype.itemsize, matmul=shape)
