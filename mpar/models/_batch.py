"""Batches: which keys a decoder reads, the check that it can read a batch, and the weight of a batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpar.errors import DataError, DtypeError, ShapeError
from mpar.models.decoder import NEXT_WEIGHTS

__all__ = ["BATCH_KEYS", "ORDER", "Batch", "batch_weight", "check_batch"]

Batch = Mapping[str, Tensor]
BATCH_KEYS = ("tokens", "labels", "positions", "documents", "token_weights")
FLOATS = ("token_weights", NEXT_WEIGHTS)
ORDER = "order"
IGNORE_INDEX = -100


def batch_weight(batch: Batch, dtype: torch.dtype) -> Tensor:
    """The sum of the token_weights (default 1) of the tokens whose label is not -100. Raises DataError without labels."""
    if "labels" not in batch:
        raise DataError("cannot weigh a batch without labels")
    counted = batch["labels"] != IGNORE_INDEX
    if "token_weights" not in batch:
        return counted.to(dtype).sum()
    return torch.where(counted, batch["token_weights"].to(dtype), 0.0).sum()


def check_batch(batch: Batch, known: Sequence[str], max_positions: int | None, row_length: int | None) -> None:
    """Check that a model can read the batch: its keys (`known`, tokens first), shapes, dtypes and length of rows.

    Raises DataError, ShapeError or DtypeError if it cannot.
    """
    unknown = sorted(set(batch) - set(known))
    if unknown or "tokens" not in batch:
        raise DataError(f"cannot read a batch with {sorted(batch)}: it needs tokens and may have {', '.join(known[1:])}")
    shape = tuple(batch["tokens"].shape)
    wrong = {key: tuple(x.shape) for key, x in batch.items() if tuple(x.shape) != (shape[1:] if key == ORDER else shape)}
    if len(shape) != 2 or wrong:
        raise ShapeError(
            f"cannot read a batch with tokens {shape} and {wrong or 'nothing else'}: order must be (S,), all others (B, S)"
        )
    floats = {key: value.dtype for key, value in batch.items() if key not in FLOATS and value.is_floating_point()}
    if floats:
        raise DtypeError(f"cannot read a batch with {floats}: these must be integers")
    length = row_length or shape[1]
    if max_positions is not None and length > max_positions:  # the length counts even if positions are given: those are not read
        raise ShapeError(
            f"cannot read rows of {length} tokens: this model has learned {max_positions} positions; use shorter rows"
        )
