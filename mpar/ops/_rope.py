"""Rotary position embedding: pairs of features turn by an angle per position  (Su et al. 2021, arXiv:2104.09864)."""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops._rows import rotated_rows
from mpar.ops.primitive import Cost, Primitive

__all__ = ["rope", "rope_many"]

rope_p = Primitive("rope", "x, cos, sin -> y", interleaved="bool")
rope_many_p = Primitive("rope_many", "xs[], cos, sin -> ys[]", interleaved="bool")
rope_many_p.mutates = ("xs",)


def rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first R of the H features of `x_BSNH` by angles whose `cos` and `sin` are (B or 1, S, R/2); copy the others.

    Pairs are features (i, i + R/2), or (2i, 2i + 1) if `interleaved`. Computed in the wider of the dtypes of `x_BSNH` and of
    the tables, which are float32 or wider; the result has the dtype of `x_BSNH`. The tables get no gradient.
    Raises ShapeError or DtypeError if they do not fit.
    """
    return rope_p.bind(x_BSNH, cos, sin, interleaved=interleaved)


def rope_many(xs: list[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> list[Tensor]:
    """`rope` of each of `xs`, such as queries and keys. The results are `xs` themselves, overwritten.

    The tables are those of `rope`; numbers of heads and head sizes may differ. The caller must not read an operand afterwards; no
    two of `xs` may overlap. There is no gradient. Raises what `rope` raises, and ShapeError if a tensor overlaps itself or the
    stride of its last dim is not 1.
    """
    return rope_many_p.bind(xs, cos, sin, interleaved=interleaved)


@rope_p.def_abstract
def _abstract(x, cos, sin, *, interleaved):
    shapes = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    if x.ndim != 4 or cos.ndim != 3:
        raise ShapeError(f"rope: {shapes}: x must be (B, S, N, H), cos and sin (B or 1, S, R/2)")
    B, S, _, H = x.shape
    if cos.shape != sin.shape or cos.shape[0] not in (1, B) or cos.shape[1] != S or 2 * cos.shape[2] > H:
        raise ShapeError(f"rope: {shapes}: cos and sin must be (1 or {B}, {S}, R/2) with R at most {H}")
    if not x.is_floating_point() or cos.dtype != sin.dtype or cos.dtype not in (torch.float32, torch.float64):
        dtypes = f"x is {x.dtype}, cos {cos.dtype}, sin {sin.dtype}"
        raise DtypeError(f"rope: {dtypes}: x must be floating, cos and sin both float32 or both float64")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@rope_p.def_impl
def _impl(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    found = rotated_rows(x, cos, sin, None, interleaved=interleaved)
    if found is not None:
        return found
    half, rest = cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    wide = x if x.dtype == cos.dtype else x.to(torch.promote_types(x.dtype, cos.dtype))
    y = torch.empty_like(wide, memory_format=torch.contiguous_format)
    turned, turning = (wide[..., : 2 * half], y[..., : 2 * half]) if rest else (wide, y)
    shape, dim = (*x.shape[:-1], *((half, 2) if interleaved else (2, half))), -1 if interleaved else -2
    turned, turning = turned.view(shape), turning.view(shape)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    torch.mul(turned, cos.unsqueeze(dim), out=turning)  # of both halves: with few tokens the calls are what takes time
    (x1, x2), (y1, y2) = turned.unbind(dim), turning.unbind(dim)
    y1.addcmul_(x2, sin, value=-1)
    y2.addcmul_(x1, sin)
    if rest:
        y[..., 2 * half :] = wide[..., 2 * half :]
    return y if y.dtype == x.dtype else y.to(x.dtype)


@rope_many_p.def_abstract
def _abstract_many(xs, cos, sin, *, interleaved):
    for x in xs:
        _abstract(x, cos, sin, interleaved=interleaved)
    wrong = [f"xs[{i}] has shape {tuple(x.shape)}, strides {x.stride()}" for i, x in enumerate(xs) if not _can_be_overwritten(x)]
    if wrong:
        raise ShapeError("rope_many: these tensors cannot be overwritten; use rope:\n" + "\n".join(wrong))
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in xs]


@rope_many_p.def_impl
def _impl_many(xs: list[Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> list[Tensor]:
    return [_overwritten(x, cos, sin, interleaved) for x in xs]


def _overwritten(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    found = rotated_rows(x, cos, sin, x, interleaved=interleaved)
    return x.copy_(_impl(x, cos, sin, interleaved=interleaved)) if found is None else found


def _can_be_overwritten(x: Tensor) -> bool:
    """Whether no two elements share memory and the last dim is contiguous."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < reach:
            return False
        reach = stride * size
    return x.shape[-1] <= 1 or x.stride(-1) == 1


@rope_p.def_vjp_by_ops("cos, sin, dy -> dx")  # the transpose of a rotation is the rotation back
def _vjp(cos, sin, dy, *, interleaved):
    return rope_p.bind(dy, cos, -sin, interleaved=interleaved)


rope_p.def_sharding("b s n h, b s r, b s r -> b s n h", need_replication="h r", linear="x")
rope_many_p.def_sharding("b s n h, b s r, b s r -> b s n h", need_replication="h r", linear="xs")


@rope_p.def_cost
def _cost(x, cos, sin, **_):
    workspace = 0 if x.element_size() >= cos.element_size() else 2 * x.numel() * cos.element_size()
    return Cost(flops=3 * x.numel(), bytes=2 * x.nbytes + cos.nbytes + sin.nbytes, workspace=workspace)


@rope_many_p.def_cost
def _cost_many(xs, cos, sin, **_):
    workspace = max((x.nbytes + _cost(x, cos, sin).workspace for x in xs), default=0)
    size = sum(x.nbytes for x in xs)
    return Cost(flops=3 * sum(x.numel() for x in xs), bytes=2 * size + cos.nbytes + sin.nbytes, workspace=workspace)


@rope_p.def_batching
def _batching(size, dims, x, cos, sin, *, interleaved):
    x = x.movedim(dims[0], 0) if dims[0] is not None else x.expand(size, *x.shape)
    num_rows = x.shape[1]
    if dims[1] is not None or dims[2] is not None or cos.shape[0] != 1:
        cos, sin = (_rows(table, dim, size, num_rows) for table, dim in ((cos, dims[1]), (sin, dims[2])))
    y = rope_p.bind(x.flatten(0, 1), cos, sin, interleaved=interleaved)
    return y.unflatten(0, (size, num_rows)), 0


def _rows(table: Tensor, dim: int | None, size: int, num_rows: int) -> Tensor:
    """`table` with a row for each of the `size * num_rows` folded rows."""
    table = table.movedim(dim, 0) if dim is not None else table.expand(size, *table.shape)
    return table.expand(-1, num_rows, -1, -1).flatten(0, 1)
