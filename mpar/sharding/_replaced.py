"""Replaced: functions of torch that are traced as others, which compute the same and do not look at data or take functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpar.errors import TraceError
from mpar.sharding._flex import flex_attention
from mpar.torch_private import flex_attention_op

__all__ = ["REPLACED"]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise TraceError("one_hot without num_classes makes a shape from the data of a tensor: give num_classes")
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _write_item(x: Tensor, index: Any, value: Any) -> None:
    number = isinstance(value, (int, float, complex)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not (isinstance(index, Tensor) and index.dtype == torch.bool and number):
        return Tensor.__setitem__(x, index, value)
    mask = index.reshape(*index.shape, *[1] * (x.ndim - index.ndim))
    x.masked_fill_(mask, value.reshape(()).to(x.dtype) if isinstance(value, Tensor) else value)
    return None


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.one_hot: _one_hot,
    Tensor.__setitem__: _write_item,
    flex_attention_op: flex_attention,
}
"""one_hot checks its operand; a write under a mask has a gradient of unknown shape; flex_attention takes functions."""
