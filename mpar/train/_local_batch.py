"""What one rank works on in a step: it reads its rows alone, and keeps of these its positions."""

import torch
from torch import Tensor

from mpar.data import Batches
from mpar.models import with_next_tokens
from mpar.program import Program, cut_rows, rows_of

__all__ = ["local_batch"]


def local_batch(
    program: Program, batches: Batches, step: int, rank: int, device: torch.device, *, next_tokens: bool = False
) -> dict[str, Tensor]:
    """The part of the global batch of `step` that `rank` works on in `program`. Other rows are neither read nor built.

    next_tokens: the program learns what follows the next token, too.
    """
    rows = batches.rows(step, rows_of(program, rank))
    if next_tokens:  # what follows a token is known only before ranks get their positions
        rows = with_next_tokens(rows)
    return {key: value.to(device) for key, value in cut_rows(program, rows, rank).items()}
