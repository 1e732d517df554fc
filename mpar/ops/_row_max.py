"""Row max: the likeliest token of each row of logits. torch's `max` looks at each number alone."""

import torch
from torch import Tensor

from mpar.ops._rows import largest_of_rows

__all__ = ["row_max"]


def row_max(x_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row (T,), and its place (T,), int64.

    Of equal numbers, the first one is taken; a NaN counts as larger than all others. There is no gradient.
    """
    found = largest_of_rows(x_TV)
    return torch.max(x_TV.detach(), -1) if found is None else found
