"""A runner without a model: its pages hold tokens, and what comes next is a hash of all tokens that a row can see there."""

import hashlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.infer import SPARE_PAGE, Scores, Sizes, Tables
from mpar.infer._scores import scores_of_logits

__all__ = ["VOCABULARY", "CachedTokens", "next_token"]

VOCABULARY = 50


def next_token(tokens: list[int], adapter: int = 0) -> int:
    """What comes behind these tokens with an adapter."""
    kept = [_kept(token, adapter) for token in tokens]
    return hashlib.blake2b(array("H", kept).tobytes(), digest_size=1).digest()[0] % VOCABULARY


def _kept(token, adapter):
    """What a page keeps of a token, or of tokens, that were read with an adapter."""
    return token + VOCABULARY * adapter


class CachedTokens:
    """Writes the tokens of a step into the pages, and reads from there what each row has."""

    vocab_size = VOCABULARY

    def __init__(self, sizes: Sizes, *, shares_pages: bool = True, adapters: Sequence[str] = ()) -> None:
        self.sizes, self.shares_pages, self.adapters = sizes, shares_pages, adapters
        self.cache = torch.full((sizes.groups, sizes.pages, sizes.page_size), -1)

    def step(self, tables: Tables) -> Tensor:
        """See `Runner`."""
        tokens_T, order_T, rows_T, pages_RP, last_R, adapters_R, _ = tables
        size, groups_T = self.sizes.page_size, rows_T // self.sizes.group_rows
        assert groups_T.bincount().max() <= self.sizes.tokens
        pages_T = pages_RP[rows_T, order_T // size]
        assert (pages_T != SPARE_PAGE).all()
        self.cache[groups_T, pages_T, order_T % size] = _kept(tokens_T, adapters_R[rows_T])
        logits_RV = torch.zeros(self.sizes.rows, VOCABULARY)
        for row, last in enumerate(last_R.tolist()):
            if last >= 0:
                seen = self.cache[row // self.sizes.group_rows, pages_RP[row]].flatten()[: int(order_T[last]) + 1]
                logits_RV[row, next_token(seen.tolist())] = 1.0
        return logits_RV

    def prepare_next(self) -> bool:
        """See `Runner`."""
        return False

    def scores(self, texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0) -> list[Scores]:
        """See `Runner`."""
        return [self._score(text, num_likeliest, adapter) for text in texts]

    def _score(self, text: Tensor, num_likeliest: int, adapter: int) -> Scores:
        expected = torch.tensor([next_token(text[: n + 1].tolist(), adapter) for n in range(len(text) - 1)])
        return scores_of_logits(torch.nn.functional.one_hot(expected, VOCABULARY).float(), text, num_likeliest)
