"""Grouped matrix product: rows are sorted by expert, and each group is multiplied by the weights of its expert."""

from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._product import product_into
from mpar.ops.primitive import Cost, Primitive

__all__ = ["grouped_matmul"]

grouped_matmul_p = Primitive("grouped_matmul", "x, w, offsets -> y")
grouped_matmul_dw_p = Primitive("grouped_matmul_dw", "x, dy, offsets -> dw")


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, offsets_E: Tensor) -> Tensor:
    """`y_RF` with `y[r] = x[r] @ w[e]` for the rows r of group e, which end before row `offsets_E[e]`; later rows are 0.

    `offsets_E` (int32 or int64) is a result of `expert_order`: it does not decrease, and is within [0, R]; groups may be empty.
    Sums are kept in float32 or wider; `x_RD` and `w_EDF` have the same floating dtype, and so has the result.
    Raises ShapeError or DtypeError if operands do not fit each other, and ShapeError for offsets that are not ends of groups.
    """
    return grouped_matmul_p.bind(x_RD, w_EDF, offsets_E)


@grouped_matmul_p.def_abstract
def _abstract(x, w, offsets):
    fits = x.ndim == 2 and w.ndim == 3 and offsets.ndim == 1 and x.shape[1] == w.shape[1] and 0 < w.shape[0] == offsets.shape[0]
    if not fits or x.shape[0] >= 2**31:
        shapes = f"x is {tuple(x.shape)}, w is {tuple(w.shape)}, offsets are {tuple(offsets.shape)}"
        raise ShapeError(f"grouped_matmul: {shapes}; they must be (R, D), (E, D, F) and (E,), with E > 0 and R < 2**31")
    _check_dtypes("grouped_matmul", x, "w", w, offsets)
    return torch.empty((x.shape[0], w.shape[2]), dtype=x.dtype, device=x.device)


def _check_dtypes(name: str, x: Tensor, other_name: str, other: Tensor, offsets: Tensor) -> None:
    if x.dtype != other.dtype or not x.is_floating_point() or offsets.dtype not in (torch.int32, torch.int64):
        dtypes = f"x is {x.dtype}, {other_name} is {other.dtype}, offsets are {offsets.dtype}"
        raise DtypeError(f"{name}: {dtypes}; the first two must be the same floating dtype, the third int32 or int64")


def _ranges(offsets: Tensor, num_rows: int) -> list[slice]:
    """The rows of each expert."""
    ends = [0, *offsets.tolist()]
    if not all(first <= last for first, last in pairwise([*ends, num_rows])):
        raise ShapeError(
            f"grouped_matmul: offsets {ends[1:]} do not divide {num_rows} rows among experts; take them from expert_order"
        )
    return [slice(first, last) for first, last in pairwise(ends)]


@grouped_matmul_p.def_impl
def _impl(x, w, offsets):
    ranges = _ranges(offsets, x.shape[0])
    y = torch.empty((x.shape[0], w.shape[2]), dtype=x.dtype, device=x.device)
    y[ranges[-1].stop :] = 0
    for expert, rows in enumerate(ranges):
        if rows.stop > rows.start:
            product_into(y[rows], x[rows], w[expert])
    return y


@grouped_matmul_p.def_vjp_by_ops("x, w, offsets, dy -> dx, dw")
def _vjp(x, w, offsets, dy):
    return grouped_matmul_p.bind(dy, w.transpose(1, 2), offsets), grouped_matmul_dw_p.bind(x, dy, offsets)


@grouped_matmul_dw_p.def_abstract
def _abstract_dw(x, dy, offsets):
    if x.ndim != 2 or dy.ndim != 2 or x.shape[0] != dy.shape[0] or offsets.ndim != 1 or not offsets.shape[0]:
        shapes = f"x is {tuple(x.shape)}, dy is {tuple(dy.shape)}, offsets are {tuple(offsets.shape)}"
        raise ShapeError(f"grouped_matmul_dw: {shapes}; they must be (R, D), (R, F) and (E,), with E > 0")
    _check_dtypes("grouped_matmul_dw", x, "dy", dy, offsets)
    return torch.empty((offsets.shape[0], x.shape[1], dy.shape[1]), dtype=x.dtype, device=x.device)


@grouped_matmul_dw_p.def_impl
def _impl_dw(x, dy, offsets):
    dw = torch.empty((offsets.shape[0], x.shape[1], dy.shape[1]), dtype=x.dtype, device=x.device)
    for expert, rows in enumerate(_ranges(offsets, x.shape[0])):
        if rows.stop > rows.start:
            product_into(dw[expert], x[rows].T, dy[rows])
        else:
            dw[expert] = 0
    return dw


@grouped_matmul_dw_p.def_vjp_by_ops("x, dy, offsets, ddw -> dx, ddy")
def _vjp_dw(x, dy, offsets, ddw):
    return grouped_matmul_p.bind(dy, ddw.transpose(1, 2), offsets), grouped_matmul_p.bind(x, ddw, offsets)


# Sharded rows come from `dispatch`: a rank has the rows of its own experts, and its offsets are about these rows only.
grouped_matmul_p.def_sharding("r d, e d f, e -> r f", follows="e:r", as_is="offsets", ragged="r:offsets", linear="x w")
grouped_matmul_p.def_batching_loop()
grouped_matmul_p.asks_host = grouped_matmul_dw_p.asks_host = True
grouped_matmul_dw_p.def_sharding("r d, r f, e -> e d f", follows="e:r", as_is="offsets", ragged="r:offsets", linear="x dy")
grouped_matmul_dw_p.def_batching_loop()


@grouped_matmul_p.def_cost
def _cost(x, w, offsets):
    num_rows, (e, d, f) = x.shape[0], w.shape
    shape = MatmulShape(batch=e, m=ceil(num_rows / e), n=f, k=d)
    return Cost(flops=2 * num_rows * d * f, bytes=w.nbytes + num_rows * (d + f) * x.element_size(), matmul=shape)


@grouped_matmul_dw_p.def_cost
def _cost_dw(x, dy, offsets):
    num_rows, d, f, e = x.shape[0], x.shape[1], dy.shape[1], offsets.shape[0]
    moved = (num_rows * (d + f) + e * d * f) * x.element_size()
    return Cost(flops=2 * num_rows * d * f, bytes=moved, matmul=MatmulShape(batch=e, m=d, n=f, k=ceil(num_rows / e)))
