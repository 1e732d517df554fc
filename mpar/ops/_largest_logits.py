"""Largest logits: logits of rows of which some need only the largest one, by a screen: a copy of the output matrix in 8 bits.

A token that is drawn without noise is that of the largest logit. The screen gives each logit with a bound of its error, so that
only the few that can be the largest are computed from the matrix, of which nearly all stays unread (mpar/cpp/largest_logits.cpp).
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Generic

import torch
from torch import Tensor

from mpar.cpp import cpp_function, cpp_structure
from mpar.errors import DtypeError, ShapeError
from mpar.op_shape import MatmulShape
from mpar.ops._product import product
from mpar.ops.primitive import Cost, Primitive
from mpar.tree import Leaf, struct

__all__ = ["MAX_SCREENED_ROWS", "Screen", "fill_screen", "largest_logits", "screens_logits"]

MAX_SCREENED_ROWS = 4
"""For more rows, what a screen saves of reading is less than what it takes to multiply with it."""
largest_logits_p = Primitive("largest_logits", "x, w, codes, absmax, errors, greedy -> logits")
largest_logits_p.opaque = True  # which rows are greedy is known when it runs

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Call = cpp_structure("_Call", ["rows", "inner", "columns", "x_row", "w_step", "y_row"], [])


@struct
class Screen(Generic[Leaf]):
    """A copy of an output matrix in 8 bits: codes uint8 (V, D), and for each row two int32 (V,), the bits of float32.

    A row is `(codes - 128) * absmax / 127`, and no more than `errors` away from that, as the length of a vector. If it has
    numbers that are not finite, `errors` is infinite: its logit is computed, and says nothing of others. So it is for a row that
    is no token, which is marked by `errors` that are NaN before the screen is made.
    """

    codes: Leaf
    absmax: Leaf
    errors: Leaf


def screens_logits(dtype: torch.dtype) -> bool:
    """Whether this CPU has a kernel that uses a screen of a matrix of this dtype; without one, a screen is of no use."""
    return dtype in _NAMES and cpp_function("largest_logits", f"screen_{_NAMES[dtype]}", 5) is not None


def fill_screen(screen: Screen[Tensor], w_VD: Tensor) -> None:
    """Make `screen` that of this matrix, whose rows have no gaps, on a CPU that `screens_logits`. NaN in `errors` stay."""
    assert w_VD.stride(1) == 1, "the numbers of a row must lie one after the other"
    fill = cpp_function("largest_logits", f"screen_{_NAMES[w_VD.dtype]}", 5)
    assert fill is not None, f"there is no screen of {w_VD.dtype}"
    columns, inner = w_VD.shape
    call = _Call(0, inner, columns, inner, w_VD.stride(0), columns)
    fill(call, w_VD.detach(), screen.codes, screen.absmax, screen.errors)


def largest_logits(x_BRD: Tensor, w_VD: Tensor, screen: Screen[Tensor], greedy_BR: Tensor) -> Tensor:
    """The logits (B, R, V) of rows: the products of `x_BRD` with each row of `w_VD`.

    Where `greedy_BR` (bool) is true, a row may have -inf in place of all logits but the largest one and those that equal it. It
    has on a CPU, if all rows are greedy and there are at most MAX_SCREENED_ROWS. `screen` is that of `w_VD`. Where ranks divide
    the vocabulary, each has the largest logits of its part. There is no gradient. Raises ShapeError or DtypeError if the operands
    do not fit each other.
    """
    return largest_logits_p.bind(x_BRD, w_VD, screen.codes, screen.absmax, screen.errors, greedy_BR)


@largest_logits_p.def_abstract
def _abstract(x, w, codes, absmax, errors, greedy):
    shapes = f"largest_logits: x {tuple(x.shape)}, w {tuple(w.shape)}, greedy {tuple(greedy.shape)}"
    if x.ndim != 3 or w.ndim != 2 or x.shape[2] != w.shape[1] or greedy.shape != x.shape[:2]:
        raise ShapeError(f"{shapes}: they must be (B, R, D), (V, D), (B, R)")
    if codes.shape != w.shape or absmax.shape != w.shape[:1] or errors.shape != w.shape[:1]:
        found = f"codes {tuple(codes.shape)}, absmax {tuple(absmax.shape)}, errors {tuple(errors.shape)}"
        raise ShapeError(f"{shapes}: the screen has {found}; they must be (V, D), (V,), (V,)")
    dtypes = codes.dtype, absmax.dtype, errors.dtype, greedy.dtype
    if x.dtype != w.dtype or not x.is_floating_point() or dtypes != (torch.uint8, torch.int32, torch.int32, torch.bool):
        raise DtypeError(
            f"{shapes}: x and w are {x.dtype} and {w.dtype}, which must be one floating dtype; codes, absmax, errors and greedy "
            f"are {', '.join(map(str, dtypes))}, which must be uint8, int32, int32 and bool"
        )
    return torch.empty((*x.shape[:2], w.shape[0]), dtype=x.dtype, device=x.device)


@largest_logits_p.def_impl
def _impl(x: Tensor, w: Tensor, codes: Tensor, absmax: Tensor, errors: Tensor, greedy: Tensor) -> Tensor:
    x_RD = x.reshape(-1, x.shape[-1])
    plan = None if x.device.type != "cpu" else _plan(x_RD.shape, x_RD.stride(), w.dtype, w.shape, w.stride())
    if plan is None or not all(x.is_contiguous() for x in (codes, absmax, errors)):
        return product(x_RD, w.t()).view(*x.shape[:-1], -1)
    run, call = plan
    logits = torch.empty((*x.shape[:-1], w.shape[0]), dtype=x.dtype)
    run(call, x_RD, w, codes, absmax, errors, greedy.contiguous(), logits)
    return logits


@functools.lru_cache(maxsize=64)
def _plan(
    shape_x: Sequence[int], stride_x: Sequence[int], dtype: torch.dtype, shape_w: Sequence[int], stride_w: Sequence[int]
) -> tuple[Callable[..., None], ctypes.Structure] | None:
    """The kernel for such operands and the structure that it reads; None if there is no kernel."""
    (rows, inner), columns = shape_x, shape_w[0]
    fits = 0 < rows <= MAX_SCREENED_ROWS and inner > 0 < columns and stride_x[1] == stride_w[1] == 1
    if not fits or dtype not in _NAMES:
        return None
    run = cpp_function("largest_logits", f"largest_logits_{_NAMES[dtype]}", 8)
    return None if run is None else (run, _Call(rows, inner, columns, stride_x[0], stride_w[0], columns))


largest_logits_p.def_sharding("b r d, v d, v d, v, v, b r -> b r v", need_replication="d")
largest_logits_p.def_batching_loop()


@largest_logits_p.def_cost
def _cost(x, w, codes, absmax, errors, greedy):
    """An upper bound: that of all logits."""
    rows, (columns, inner) = x.numel() // x.shape[-1], w.shape
    shape = MatmulShape(batch=1, m=rows, n=columns, k=inner)
    moved = x.nbytes + w.nbytes + rows * columns * x.element_size()
    return Cost(flops=2 * rows * columns * inner, bytes=moved, matmul=shape)
