"""Documents laid out in sequences of equal length, in an order that is drawn for each epoch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpar.data._answers import Answers
from mpar.data._documents import Documents
from mpar.data._packing import pack
from mpar.data._random import DOCUMENT_ORDER, SEQUENCE_ORDER, random_keys

__all__ = ["IGNORED", "Layout", "Sequences"]

IGNORED = -100
"""The label of positions that are not trained on."""


class Sequences:
    """Documents in sequences of `seq_len` positions: one in each, or with `packing` all that were packed into it, best-fit
    decreasing over all documents, so that every epoch has the same number of sequences. Each document begins at a multiple of
    `pad_to_multiple`, which divides `seq_len`. The two documents of a pair are packed as one. With `answers`, a sequence holds no
    more documents than it may have answers.
    """

    def __init__(
        self, documents: Documents, seq_len: int, *, packing: bool, pad_to_multiple: int = 1, answers: Answers | None = None
    ) -> None:
        self.documents, self._multiple, self._answers = documents, pad_to_multiple, answers
        # A bin lists the slots of one sequence. A slot is a place for a document, or a pair, of one length; a layout fills the
        # slots.
        sizes = self.sizes(documents, pad_to_multiple)
        self._lengths = sizes if documents.pairs else documents.lengths
        most = None if answers is None else answers.count // documents.together
        self._bins = pack(sizes, seq_len, most) if packing else [[i] for i in range(len(sizes))]

    @staticmethod
    def sizes(documents: Documents, pad_to_multiple: int) -> NDArray[np.int64]:
        """The positions that each document takes, or each pair of them."""
        return _rounded_up(documents.lengths, pad_to_multiple).reshape(-1, documents.together).sum(1)

    def __len__(self) -> int:
        """The number of sequences that hold a document."""
        return len(self._bins)

    def layout(self, seed: int, epoch: int, *, shuffle: bool) -> "Layout":
        """The documents in each sequence of an epoch. With `shuffle`, the order of sequences is drawn for each (seed, epoch), and
        documents of equal length change places.
        """
        lengths = self._lengths
        document_of_slot, sequence_order = np.arange(len(lengths)), np.arange(len(self._bins))
        if shuffle:
            # documents change places only with others of the same length, so that every bin stays as full as it was
            keys = random_keys(len(lengths), seed, epoch, DOCUMENT_ORDER)
            document_of_slot[np.argsort(lengths, kind="stable")] = np.lexsort((keys, lengths))
            sequence_order = random_keys(len(self._bins), seed, epoch, SEQUENCE_ORDER).argsort(kind="stable")
        if self.documents.pairs:
            document_of_slot = document_of_slot * 2
        return Layout(self.documents, self._bins, document_of_slot, sequence_order, self._multiple, self._answers)


class Layout:
    """Which documents the sequences of one epoch hold, in which order."""

    def __init__(
        self,
        documents: Documents,
        bins: list[list[int]],
        document_of_slot: NDArray[np.int64],
        sequence_order: NDArray[np.int64],
        pad_to_multiple: int,
        answers: Answers | None,
    ) -> None:
        self._documents, self._bins, self._multiple, self._answers = documents, bins, pad_to_multiple, answers
        self._document_of_slot, self._sequence_order = document_of_slot, sequence_order

    def documents_in(self, sequence: int) -> NDArray[np.int64]:
        """The documents of a sequence, in order; none behind the last one."""
        in_slots = self._bins[self._sequence_order[sequence]] if sequence < len(self._bins) else []
        firsts = self._document_of_slot[np.asarray(in_slots, dtype=np.int64)]
        return np.stack([firsts, firsts + 1], 1).reshape(-1) if self._documents.pairs else firsts

    def names(self, sequence: int) -> list[str]:
        """Where the documents of a sequence are from, and what is known of them besides."""
        return [self._documents.label(document) for document in self.documents_in(sequence).tolist()]

    def write(self, sequence: int, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the documents of a sequence, one after the other, into arrays of (seq_len,), which hold padding; and what is said
        of answers, also into arrays of (count,)."""
        source, position = self._documents, 0
        for number, document in enumerate(self.documents_in(sequence)):
            start, length = int(source.starts[document]), int(source.lengths[document])
            to, shifted = slice(position, position + length), slice(start + 1, start + length + 1)
            arrays["tokens"][to] = source.tokens[start : start + length]
            arrays["labels"][to] = np.where(source.trained[shifted] != 0, source.tokens[shifted], IGNORED)
            if "token_weights" in arrays:
                arrays["token_weights"][to] = source.trained[shifted]
            arrays["positions"][to] = np.arange(length)
            arrays["documents"][to] = number
            if self._answers is not None:
                self._answers.write(source, document, number, to, arrays)
            position = int(_rounded_up(position + length, self._multiple))


def _rounded_up(size: Any, multiple: int) -> Any:
    return -(-size // multiple) * multiple
