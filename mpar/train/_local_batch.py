"""The part of a batch that one rank works on: the rows that it needs, and of these the positions that it has."""

import torch
from torch import Tensor

from mpar.data import Batches
from mpar.models import with_next_tokens
from mpar.program import Program, cut_rows, rows_of

__all__ = ["local_batch"]


def local_batch(
    program: Program, batches: Batches, step: int, rank: int, device: torch.device, *, next_tokens: bool = False
) -> dict[str, Tensor]:
    """The part of the global batch of `step` that `rank` works on in `program`. Rows of other ranks are not read.

    next_tokens: the model also learns the tokens after the next, so the batch has labels for them.
    """
    rows = batches.rows(step, rows_of(program, rank))
    if next_tokens:  # must come before positions are cut, because the following token may be on another rank
        rows = with_next_tokens(rows)
    return {key: value.to(device) for key, value in cut_rows(program, rows, rank).items()}
