"""Covariances, correlations and diagonals, where torch looks at data or writes by strides of memory."""

import torch
from torch import Tensor

__all__ = ["corrcoef", "cov", "fill_diagonal_"]


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """What `torch.cov` computes: the covariances of the rows of `input`; counts are not checked to be positive.

    With `aweights` it is torch's function, which looks at data: by how much they reduce the number of observations is prone to
    cancel.
    """
    if aweights is not None:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    x_VO = input if input.ndim == 2 else input.reshape(1, -1)
    counts_O = torch.ones_like(x_VO[0]) if fweights is None else fweights.to(x_VO.dtype)
    total = counts_O.sum()
    centred_VO = x_VO - (x_VO * counts_O).sum(1, keepdim=True) / total
    products_VV = centred_VO @ (centred_VO * counts_O).mT.conj() / (total - correction).real.clamp(min=0)
    return products_VV.squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """What `torch.corrcoef` computes: the correlations of the rows of `input`."""
    products_VV = cov(input)
    if products_VV.ndim == 0:
        return products_VV / products_VV
    on_diagonal_VV = torch.eye(len(products_VV), dtype=torch.bool)
    deviation_V = torch.where(on_diagonal_VV, products_VV.real, 0).sum(1).sqrt()
    correlation_VV = products_VV / deviation_V[:, None] / deviation_V[None]
    if not correlation_VV.is_complex():
        return correlation_VV.clamp(-1, 1)
    return torch.complex(correlation_VV.real.clamp(-1, 1), correlation_VV.imag.clamp(-1, 1))


def fill_diagonal_(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """What `Tensor.fill_diagonal_` does: write where all indices are the same; with `wrap` again and again down a tall matrix."""
    if x.ndim < 2 or (x.ndim > 2 and len(set(x.shape)) > 1):
        return Tensor.fill_diagonal_(x, fill_value, wrap)  # which says what is wrong
    rows = torch.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    if x.ndim == 2 and wrap:
        rows = rows % (x.shape[1] + 1)
    mask = torch.ones((), dtype=torch.bool)
    for dim in range(1, x.ndim):
        mask = mask & (rows == torch.arange(x.shape[dim]).reshape(-1, *[1] * (x.ndim - 1 - dim)))
    return x.masked_fill_(mask, fill_value)
