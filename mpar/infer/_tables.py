"""Tables: what a runner is given for a step: tokens, where these stand, and what is wanted of each row."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Tables"]


class Tables(NamedTuple):
    """A step of T tokens of R rows; those of a row stand in their order. All are int64 but `greedy_R`.

    tokens_T:   the tokens, at most `Sizes.tokens`. order_T: their places in their rows, from 0 on.
    rows_T:     the rows that they belong to.
    pages_RP:   the pages of each row, in order; those behind the last are the spare page, and rows without tokens mean nothing.
                The next step changes it.
    last_R:     for each row, the number of the token whose logits are wanted; -1: of none.
    adapters_R: the number of each row's adapter, from 1 on; 0: none.
    greedy_R:   whether of a row only the largest logit is wanted (bool), or no logits at all.
    """

    tokens_T: Tensor
    order_T: Tensor
    rows_T: Tensor
    pages_RP: Tensor
    last_R: Tensor
    adapters_R: Tensor
    greedy_R: Tensor

    @classmethod
    def of(cls, tokens_T: Tensor, order_T: Tensor, rows_T: Tensor, pages_RP: Tensor, last_R: Tensor) -> "Tables":
        """A step of rows without adapters of which all logits are wanted."""
        none_R = torch.zeros_like(last_R)
        return cls(tokens_T, order_T, rows_T, pages_RP, last_R, none_R, none_R.bool())
