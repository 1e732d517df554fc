"""Dropout in training. What is dropped depends on the seed, the step, the row and position of a token, and the layer.

A batch gives every token a number, `with_draws`; the context gives every segment one, `segment_numbers`. So the same is dropped
on every mesh, with every schedule, however a batch is cut, and when a layer is computed again.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes, of_segment
from mpar.errors import ConfigError, DataError

__all__ = ["DRAW", "DRAW_AXES", "check_rate", "drop", "segment_numbers", "with_draws"]

DRAW = "draw"
"""The batch key, int64 (B, S), of the numbers by which training drops; see `with_draws`."""
DRAW_AXES: Axes = ("batch", "seq")
_NUMBER = "segment_number"
_BITS = 62  # of a number; the sign and one more bit stay free, so that no sum overflows


def with_draws(batch: Mapping[str, Tensor], *, seed: int, step: int, rows: Sequence[int], num_rows: int) -> dict[str, Tensor]:
    """`batch` with `draw`: for each token a number that no other token of the training has, in an order that starts at `seed`.

    rows: which of the `num_rows` rows of the global batch of `step` the batch holds, whose tokens are (B, S). They must not be
    permuted yet, so call this before rows are dealt out to ranks that share a sequence.
    """
    length = batch["tokens"].shape[1]
    words = ops.fold_key(seed, DRAW)
    start = (words[0] + (words[1] << 32) + step * num_rows * length) % 2**_BITS
    number_BS = torch.tensor(rows)[:, None] * length + torch.arange(length) + start
    return {**batch, DRAW: number_BS & (2**_BITS - 1)}


def segment_numbers(names: Sequence[str], draw_BS: Tensor) -> dict[str, Tensor]:
    """For the context: the number of each of these segments, which only the segment itself reads."""
    return {of_segment(_NUMBER, name): torch.full_like(draw_BS[0, 0], i) for i, name in enumerate(names)}


def drop(x: Tensor, rate: float, context: Mapping[str, Tensor], label: str) -> Tensor:
    """`ops.token_dropout` of `x`, whose first dims are those of tokens; `label` tells several dropouts of a segment apart.

    Raises DataError if the batch that the context was made of has no numbers.
    """
    if rate == 0:
        return x
    if DRAW not in context or _NUMBER not in context:
        raise DataError(
            f"cannot drop with rate {rate} in training: the batch has no {DRAW!r}, by which tokens are dropped; "
            "models.with_draws makes it"
        )
    return ops.token_dropout(x, rate, context[DRAW], context[_NUMBER], label)


def check_rate(name: str, rate: float) -> None:
    """Raise ConfigError unless `rate`, which was given as `name`, is a probability below 1."""
    if not 0 <= rate < 1:
        raise ConfigError(f"cannot drop with {name}={rate}: it is a probability in [0, 1)")
