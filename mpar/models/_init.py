"""Normal numbers for fresh parameters: any elements of a leaf, since each depends only on the key and its global index."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar import ops

__all__ = ["normal"]

INIT_BLOCK = 1 << 22
"""How many elements are drawn at once, at most."""


def normal(key: ops.Key, bounds: Sequence[range], dtype: torch.dtype) -> Tensor:
    """Normal numbers: the elements within `bounds`.

    They are drawn some rows at a time, because the generator needs a workspace many times as large as its result.
    """
    sizes, starts = [len(bound) for bound in bounds], [bound.start for bound in bounds]
    out = torch.empty(sizes, dtype=dtype)
    num_rows = max(1, INIT_BLOCK // max(1, math.prod(sizes[1:])))
    for row in range(0, sizes[0], num_rows):
        rows = out[row : row + num_rows]
        rows.copy_(ops.random_normal(key, rows.shape, starts=[starts[0] + row, *starts[1:]]))
    return out
