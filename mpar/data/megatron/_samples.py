"""Which tokens make sample k: the order of Megatron's GPTDataset, number for number.

The documents of all epochs are shuffled and joined into one row of tokens, which is cut into samples of `seq_len` + 1 tokens,
each of which begins with the last token of the one before. Then the samples are shuffled. All draws are those of one RandomState,
whose numbers are the same in every version of numpy.

Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py and helpers.cpp.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpar.errors import DataError

__all__ = ["Samples", "draw_samples"]

_SEPARATE_BELOW = 0.80
"""The last epoch is shuffled apart from the others if less than this share of its samples is needed."""
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Samples:
    """What each sample consists of.

    documents: the document at each place of all epochs, (places,) int32.
    starts:    the place and the offset in its document at which each sample begins, (samples + 1, 2) int32 or int64.
    order:     the sample at each place of the shuffled order, (samples,) uint32 or int64.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.integer]
    order: NDArray[np.integer]

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.order)

    def parts(self, number: int) -> Iterator[tuple[int, int, int | None]]:
        """(document, offset, length) of each piece of sample `number` of the shuffled order; a length of None is up to the end.

        The last piece has the extra token, with which the next sample begins.
        """
        sample = int(self.order[number])
        (first, offset), (last, end) = self.starts[sample].tolist(), self.starts[sample + 1].tolist()
        for place in range(first, last + 1):
            start = offset if place == first else 0
            yield int(self.documents[place]), start, end + 1 - start if place == last else None


def draw_samples(
    lengths: NDArray[np.int32], documents: NDArray[np.integer], *, seq_len: int, num_samples: int | None, seed: int
) -> Samples:
    """The samples of `documents`, at least `num_samples` of them, or those of one epoch.

    lengths: the number of tokens of every document of the file. Megatron calls each sequence of a file a document here.
    Raises DataError if the documents have fewer than two tokens, or too few for one sample.
    """
    epoch = _Epochs(int(lengths[documents].sum(dtype=np.int64)), seq_len, num_samples)
    if epoch.num_samples < 1:
        raise DataError(
            f"cannot cut {epoch.tokens:,} tokens into samples of {seq_len} positions: a sample takes {seq_len + 1} tokens.\n"
            "Use a smaller data.seq_len, or more data."
        )
    random = np.random.RandomState(seed)
    placed = _shuffled_documents(documents, epoch, random)
    starts = _sample_starts(lengths, placed, epoch)
    order = _shuffled_samples(epoch, random)
    return Samples(placed, starts, order)


@dataclass(frozen=True)
class _Epochs:
    """How many epochs there are, and where the last of them begins."""

    tokens: int  # of one epoch
    seq_len: int
    wanted: int | None

    @cached_property
    def count(self) -> int:
        needed = 0 if self.wanted is None else self.wanted * self.seq_len + 1
        return max(1, -(-needed // max(self.tokens, 1)))

    @cached_property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return self._samples_of(self.count)

    @cached_property
    def num_before_last(self) -> int:
        """Samples that end before the last epoch."""
        return self._samples_of(self.count - 1)

    @cached_property
    def separate_last(self) -> bool:
        """Whether the last epoch is shuffled apart from the others."""
        if self.count == 1 or self.wanted is None:
            return False
        return self.wanted - self.num_before_last < int(_SEPARATE_BELOW * self._samples_of(1))

    def _samples_of(self, epochs: int) -> int:
        return max(0, epochs * self.tokens - 1) // self.seq_len


def _shuffled_documents(documents: NDArray[np.integer], epochs: _Epochs, random: np.random.RandomState) -> NDArray[np.int32]:
    parts = (epochs.count - 1, 1) if epochs.separate_last else (epochs.count,)
    shuffled = []
    for count in parts:
        part = np.tile(documents.astype(np.int32), count)
        random.shuffle(part)
        shuffled.append(part)
    return np.concatenate(shuffled) if len(shuffled) > 1 else shuffled[0]


def _sample_starts(lengths: NDArray[np.int32], placed: NDArray[np.int32], epochs: _Epochs) -> NDArray[np.integer]:
    """Sample k begins at token k * seq_len of the joined documents: the place is found by bisection in the sums of lengths."""
    large = max(len(placed), int(lengths.max())) > np.iinfo(np.int32).max
    starts = np.zeros((epochs.num_samples + 1, 2), np.int64 if large else np.int32)
    ends = np.cumsum(lengths[placed], dtype=np.int64)
    for first in range(1, len(starts), _CHUNK):
        tokens = np.arange(first, min(first + _CHUNK, len(starts)), dtype=np.int64) * epochs.seq_len
        places = np.searchsorted(ends, tokens, side="right")
        starts[first : first + len(tokens), 0] = places
        starts[first : first + len(tokens), 1] = tokens - ends[places] + lengths[placed[places]]
    return starts


def _shuffled_samples(epochs: _Epochs, random: np.random.RandomState) -> NDArray[np.integer]:
    total = epochs.num_samples
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    bounds = [0, epochs.num_before_last, total] if epochs.separate_last else [0, total]
    parts: list[NDArray[np.integer]] = [np.arange(first, last, dtype=dtype) for first, last in itertools.pairwise(bounds)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
