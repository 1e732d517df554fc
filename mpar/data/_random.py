"""Random numbers that depend on nothing but what they are for."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["DOCUMENT_ORDER", "FILE_ORDER", "SEQUENCE_ORDER", "SOURCE_ORDER", "SPLIT", "random_keys", "random_order"]

DOCUMENT_ORDER, SEQUENCE_ORDER, SPLIT, SOURCE_ORDER, FILE_ORDER, PROMPT_ORDER = range(6)
"""Purposes of random numbers, each of which has a stream of its own."""


def random_keys(count: int, *what: int) -> NDArray[np.uint64]:
    """Raw words of PCG64. They are the same in all versions of numpy, which the permutations of its Generator are not.

    what: at least 0 each: the seed, the number of the epoch, and the purpose.
    """
    return np.random.PCG64(np.random.SeedSequence(what)).random_raw(count)


def random_order(count: int, seed: int, epoch: int, attempt: int) -> list[int]:
    """A permutation of `count` prompts, another one for each epoch, and for each attempt to draw other prompts in their place."""
    return random_keys(count, seed, epoch, PROMPT_ORDER, attempt).argsort(kind="stable").tolist()
