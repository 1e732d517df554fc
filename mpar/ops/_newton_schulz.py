"""Newton-Schulz: matrices whose singular values are brought near 1, as Muon steps by (Jordan et al. 2024, "Muon")."""

import math

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = ["newton_schulz"]

newton_schulz_p = Primitive("newton_schulz", "x -> y", rows="int", columns="int", num_rounds="int", narrow="bool")

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the quintic polynomial a x + b x^3 + c x^5 of the post and of torch.optim.Muon
_EPS = 1e-7


def newton_schulz(x: Tensor, *, rows: int = 1, columns: int = 1, num_rounds: int = 5, narrow: bool = True) -> Tensor:
    """Each matrix U S V^T of `x` as U S' V^T, where every number of S' is near 1. The result has the shape and dtype of `x`.

        X <- X / |X|;  num_rounds times: G <- X X^T; X <- a X + (b G + c G G) X

    rows, columns: how many dims are merged into the rows and into the columns of a matrix; they are the last dims of `x`, and the
            dims before them count matrices.
    narrow: compute in bfloat16, as torch.optim.Muon does; else in the dtype of `x`.

    There is no gradient. Raises ShapeError unless rows and columns have dims, DtypeError if `x` is not floating point.
    """
    return newton_schulz_p.bind(x, rows=rows, columns=columns, num_rounds=num_rounds, narrow=narrow)


@newton_schulz_p.def_abstract
def _abstract(x, *, rows, columns, num_rounds, narrow):
    if rows < 1 or columns < 1 or x.ndim < rows + columns:
        raise ShapeError(
            f"newton_schulz: x {tuple(x.shape)} has {x.ndim} dims; rows={rows} and columns={columns} must be at least 1, and not "
            "more together"
        )
    if not x.is_floating_point():
        raise DtypeError(f"newton_schulz: x {tuple(x.shape)} has dtype {x.dtype}, needs a floating dtype")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@newton_schulz_p.def_impl
def _impl(x: Tensor, *, rows: int, columns: int, num_rounds: int, narrow: bool) -> Tensor:
    num, m, n = _sizes(x, rows, columns)
    matrices = x.reshape(num, m, n).mT  # (out, in), as torch.nn.Linear stores a weight, so that squares are treated as there
    ys = [_orthogonalised(matrix, num_rounds, narrow) for matrix in matrices.unbind()]
    return torch.stack(ys).to(x.dtype).mT.reshape(x.shape).contiguous() if ys else x.new_empty(x.shape)


def _orthogonalised(matrix: Tensor, num_rounds: int, narrow: bool) -> Tensor:
    wide = matrix.bfloat16() if narrow else matrix
    wide = wide.T if matrix.size(0) > matrix.size(1) else wide
    wide = wide / wide.norm().clamp(min=_EPS)
    for _ in range(num_rounds):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        wide = torch.addmm(wide, polynomial, wide, beta=_A)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def _sizes(x: Tensor, rows: int, columns: int) -> tuple[int, int, int]:
    """How many matrices there are, and the rows and columns of each."""
    first, middle = x.ndim - rows - columns, x.ndim - columns
    return math.prod(x.shape[:first]), math.prod(x.shape[first:middle]), math.prod(x.shape[middle:])


@newton_schulz_p.def_sharding_from
def _sharding(*, rows: int, columns: int, num_rounds: int, narrow: bool) -> ShardingRule:
    """Matrices may be on different ranks; each is brought together, so that all ranks get the same bits."""
    inside = " ".join([*(f"r{i}" for i in range(rows)), *(f"c{i}" for i in range(columns))])
    return parse_sharding(f"... {inside} -> ... {inside}", need_replication=inside)


newton_schulz_p.def_batching_leading()


@newton_schulz_p.def_cost
def _cost(x, *, rows, columns, num_rounds, narrow):
    num, m, n = _sizes(x, rows, columns)
    short, long = min(m, n), max(m, n)
    flops = num_rounds * num * (4 * short * short * long + 2 * short**3)
    return Cost(flops=flops, bytes=2 * x.nbytes, workspace=4 * x.nbytes)
