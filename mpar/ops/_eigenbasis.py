"""Eigenbases that follow a slowly changing matrix, as SOAP computes in (Vyas et al. 2024, arXiv:2409.11321, alg. 3 and 4)."""

import math

import torch
from torch import Tensor

from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive, ShardingRule, parse_sharding

__all__ = ["eigenbasis"]

eigenbasis_p = Primitive("eigenbasis", "matrix, basis, step -> new_basis", dims="int", every="int")


def eigenbasis(matrix: Tensor, basis: Tensor, step: Tensor, *, every: int, dims: int = 1) -> Tensor:
    """The orthonormal basis for the update `step`, whose columns are nearly the eigenvectors of `matrix`. It has the shape and
    dtype of `basis`.

        step = 1: the identity. step = 1 + every: the eigenvectors of `matrix`. step = 1 + k every: QR(matrix basis), a round of
        power iteration (alg. 4). In all other steps `basis` itself.

    matrix: symmetric: its last `dims` dims, merged, are the columns, the `dims` before them the rows. Dims before these count
            matrices.
    step:   a scalar, the number of the update, counted from 1.

    Factorised in float32 or wider. There is no gradient.

    Raises ShapeError if the shapes do not fit, DtypeError if the matrix is not floating point.
    """
    return eigenbasis_p.bind(matrix, basis, step, dims=dims, every=every)


@eigenbasis_p.def_abstract
def _abstract(matrix, basis, step, *, dims, every):
    first = matrix.ndim - 2 * dims
    square = dims >= 1 and first >= 0 and matrix.shape[first : first + dims] == matrix.shape[first + dims :]
    if not square or basis.shape != matrix.shape:
        raise ShapeError(
            f"eigenbasis: matrix {tuple(matrix.shape)} and basis {tuple(basis.shape)} must have one shape, whose last "
            f"{dims} dims are the {dims} dims before them"
        )
    if step.ndim:
        raise ShapeError(f"eigenbasis: step is a scalar, not {tuple(step.shape)}")
    if every < 1:
        raise ConfigError(f"eigenbasis: every={every} must be at least 1")
    if not matrix.is_floating_point():
        raise DtypeError(f"eigenbasis: matrix {tuple(matrix.shape)} has dtype {matrix.dtype}, needs a floating dtype")
    return torch.empty(basis.shape, dtype=basis.dtype, device=basis.device)


@eigenbasis_p.def_impl
def _impl(matrix: Tensor, basis: Tensor, step: Tensor, *, dims: int, every: int) -> Tensor:
    past = int(step) - 1
    if past > 0 and past % every:
        return basis.clone(memory_format=torch.contiguous_format)
    num, n = _sizes(matrix, dims)
    matrices, bases = _widened(matrix).reshape(num, n, n), _widened(basis).reshape(num, n, n)
    if past <= 0:
        new = torch.eye(n, dtype=basis.dtype, device=basis.device).expand(num, n, n)
    elif past == every:
        new = torch.linalg.eigh(matrices).eigenvectors.flip(-1)  # the largest eigenvalue first, as power iteration sorts them
    else:
        new = torch.linalg.qr(matrices @ bases).Q
    return new.to(basis.dtype).reshape(basis.shape).contiguous()


def _widened(x: Tensor) -> Tensor:
    """`x` in a dtype in which torch factorises matrices."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sizes(matrix: Tensor, dims: int) -> tuple[int, int]:
    """How many matrices there are, and the rows of each."""
    return math.prod(matrix.shape[: matrix.ndim - 2 * dims]), math.prod(matrix.shape[matrix.ndim - dims :])


@eigenbasis_p.def_sharding_from
def _sharding(*, dims: int, every: int) -> ShardingRule:
    """Matrices may be on different ranks; each is brought together, so that all ranks get the same bits."""
    inside = " ".join([*(f"r{i}" for i in range(dims)), *(f"c{i}" for i in range(dims))])
    return parse_sharding(f"... {inside}, ... {inside}, -> ... {inside}", need_replication=inside)


eigenbasis_p.def_batching_leading()
eigenbasis_p.asks_host = True  # for the number of the step


@eigenbasis_p.def_cost
def _cost(matrix, basis, step, *, dims, every):
    """The mean over steps: most of them copy the basis, one of `every` multiplies and factorises (QR with Q: 8/3 n^3)."""
    num, n = _sizes(matrix, dims)
    return Cost(flops=round(num * (2 + 8 / 3) * n**3 / every), bytes=2 * basis.nbytes, workspace=3 * basis.nbytes)
