"""Global batches by the number of their step: a pure function of the data, the seed and the step, never of the mesh."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpar.data._documents import Documents, LoadReport
from mpar.data._packing import pack
from mpar.errors import ConfigError, DataError

__all__ = ["BatchShape", "Batches", "DocumentBatches"]

_IGNORED = -100
_DOCUMENT_ORDER, _SEQUENCE_ORDER, _SPLIT = range(3)  # purposes of random numbers, each of which has a stream of its own


@dataclass(frozen=True)
class BatchShape:
    """`batch_size` sequences of `seq_len` positions in every step. With `packing`, a sequence may hold several documents."""

    batch_size: int
    seq_len: int
    packing: bool = True


class Batches(ABC):
    """Random access to global batches. There is no iterator, so a run resumes with nothing but the number of its step.

    shape:   rows and positions of each batch.
    seed:    of the order. shuffle: whether the order is drawn, and not that of the data.
    pad_id:  the token in positions that hold no data.
    report:  what became of the rows of the data.
    """

    shape: BatchShape
    seed: int
    shuffle: bool
    pad_id: int
    report: LoadReport

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the batches depend on: data, shape, seed, shuffle, padding."""
        content = (self.data_fingerprint, self.shape, self.seed, self.shuffle, self.pad_id)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    @abstractmethod
    def data_fingerprint(self) -> str:
        """A hash of the data alone."""

    @property
    def weighed(self) -> bool:
        """Whether labels weigh more or less than 1, so that batches say how much."""
        return False

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.integer]:
        """The positions that each document takes, (documents,)."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps that feed all data once."""

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of `step`, in int64, (batch_size, seq_len). Steps are counted from 0 through all epochs.

        tokens:     ids of tokens; padding has the padding id.
        labels:     the next token where it is trained on, else -100.
        positions:  from 0 in each document; 0 in padding.
        documents:  0, 1, ... within a sequence; -1 in padding.
        token_weights: if `weighed`, what each label weighs in the loss, in float32.
        Raises ConfigError if step < 0.
        """
        return self.rows(step, range(self.shape.batch_size))

    def rows(self, step: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """These rows of `batch(step)`, in the given order. The data of other rows are not read.

        Raises ConfigError if a row is not in [0, batch_size), DataError if a row cannot be read.
        """
        if step < 0:
            raise ConfigError(f"cannot make the batch of step {step}: steps count from 0.")
        outside = [row for row in rows if not 0 <= row < self.shape.batch_size]
        if outside:
            raise ConfigError(f"cannot read rows {outside} of a batch: it has {self.shape.batch_size} rows, counted from 0.")
        fills = {"tokens": self.pad_id, "labels": _IGNORED, "positions": 0, "documents": -1}
        size = (len(rows), self.shape.seq_len)
        arrays: dict[str, NDArray[Any]] = {name: np.full(size, value, dtype=np.int64) for name, value in fills.items()}
        if self.weighed:
            arrays["token_weights"] = np.zeros(size, dtype=np.float32)
        for out, row in enumerate(rows):
            self._fill_row(step, row, {name: array[out] for name, array in arrays.items()})
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @abstractmethod
    def names(self, step: int, row: int) -> list[str]:
        """Where the documents of a row of `batch(step)` are from: for each its file and line."""

    @abstractmethod
    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Write one row of a batch into arrays of (seq_len,), which hold padding."""

    @abstractmethod
    def split(self, fraction: float) -> tuple["Batches", "Batches"]:
        """(training, validation): about `fraction` of the data, at least one piece, go to validation, which is not shuffled.

        Raises ConfigError if `fraction` is not in (0, 1), DataError if the data cannot be split.
        """


class DocumentBatches(Batches):
    """Batches of documents in memory.

    An epoch feeds every document once, and never cuts one. A sequence holds one document, or with `packing` all that were packed
    into it (best-fit decreasing over all documents, so that every epoch has the same number of sequences). For each (seed, epoch)
    the order of sequences is drawn anew, and documents of equal length change places. The last batch of an epoch is filled up
    with sequences of padding, which have no labels.

    Raises ConfigError for sizes below 1 or a negative seed, DataError if a document does not fit into a sequence or an id
    is outside [0, vocab_size).
    """

    def __init__(
        self,
        documents: Documents,
        shape: BatchShape,
        *,
        vocab_size: int,
        pad_id: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        report: LoadReport | None = None,
    ):
        wrong = [f"{name}={getattr(shape, name)}" for name in ("batch_size", "seq_len") if getattr(shape, name) < 1]
        wrong += [f"seed={seed}"] * (seed < 0) + [f"pad_id={pad_id}"] * (not 0 <= pad_id < vocab_size)
        if wrong:
            raise ConfigError(
                f"cannot make batches with {', '.join(wrong)}: sizes are at least 1, the seed at least 0, "
                f"the id in [0, {vocab_size})."
            )
        if len(documents) == 0:
            raise DataError("cannot make batches: there is no document.")
        too_long = np.flatnonzero(documents.lengths > shape.seq_len)
        if len(too_long):
            name, length = documents.names[documents.rows[too_long[0]]], documents.lengths[too_long[0]]
            raise DataError(
                f"cannot make batches: {len(too_long)} documents do not fit into {shape.seq_len} positions; the first, {name}, "
                f"takes {length}. Raise seq_len, or cut or drop them (truncation)."
            )
        documents.check_ids(vocab_size)
        self.documents = documents
        self.shape = shape
        self.seed = seed
        self.shuffle = shuffle
        self.report = report or LoadReport()
        self._vocab_size = vocab_size
        self.pad_id = pad_id
        # A bin lists the slots of one sequence. A slot is a place for a document of one length; `_layout` fills the slots.
        self._bins = pack(documents.lengths, shape.seq_len) if shape.packing else [[i] for i in range(len(documents))]
        self._layouts: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def data_fingerprint(self) -> str:
        """A hash of the documents."""
        return self.documents.fingerprint

    @property
    def weighed(self) -> bool:
        """Whether documents have weights other than 0 and 1."""
        return self.documents.trained.dtype != np.bool_

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The positions that each document takes."""
        return self.documents.lengths

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch that hold a document."""
        return len(self._bins)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps that feed every document once."""
        return -(-len(self._bins) // self.shape.batch_size)

    @property
    def fill_ratio(self) -> float:
        """The share of positions that hold a document, in the sequences that hold any."""
        return float(self.documents.lengths.sum()) / (self.num_sequences * self.shape.seq_len)

    def names(self, step: int, row: int) -> list[str]:
        """Where the documents of a row of `batch(step)` are from."""
        return [self.documents.names[self.documents.rows[document]] for document in self._documents_of(step, row)]

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        self._write(arrays, self._documents_of(step, row))

    def _documents_of(self, step: int, row: int) -> NDArray[np.int64]:
        """The documents of a row, in order; none in the padding at the end of an epoch."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        document_of_slot, sequence_order = self._layout(epoch)
        sequence = step_in_epoch * self.shape.batch_size + row
        in_slots = self._bins[sequence_order[sequence]] if sequence < len(self._bins) else []
        return document_of_slot[np.asarray(in_slots, dtype=np.int64)]

    def split(self, fraction: float) -> tuple["DocumentBatches", "DocumentBatches"]:
        """(training, validation): about `fraction` of the rows, at least one, go to validation, which is not shuffled.

        All documents of a row, and its repetitions, go to the same side. The choice depends only on the documents, not on the
        seed. Raises ConfigError if `fraction` is not in (0, 1), DataError if there are fewer than two rows.
        """
        if not 0 < fraction < 1:
            raise ConfigError(f"cannot split off {fraction} of the data for validation: the fraction must be in (0, 1).")
        present = np.unique(self.documents.rows)
        if len(present) < 2:
            raise DataError(f"cannot split {len(present)} row of data into training and validation: it takes two.")
        key = int(self.documents.fingerprint[:16], 16)
        count = min(max(1, round(fraction * len(present))), len(present) - 1)
        held_out = np.sort(present[_random_keys(len(present), key, 0, _SPLIT).argsort(kind="stable")[:count]])
        training = np.setdiff1d(present, held_out, assume_unique=True)
        report = replace(self.report, num_held_out=count)
        return self._subset(training, self.shuffle, report), self._subset(held_out, False, report)

    def _subset(self, rows: NDArray[np.int64], shuffle: bool, report: LoadReport) -> "DocumentBatches":
        return DocumentBatches(
            self.documents.select(rows),
            self.shape,
            vocab_size=self._vocab_size,
            pad_id=self.pad_id,
            seed=self.seed,
            shuffle=shuffle,
            report=report,
        )

    def _layout(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the document in each slot, the order of sequences) of an epoch. The results for the last two epochs are cached."""
        if epoch not in self._layouts:
            lengths = self.documents.lengths
            document_of_slot, sequence_order = np.arange(len(lengths)), np.arange(len(self._bins))
            if self.shuffle:
                # documents change places only with others of the same length, so that every bin stays as full as it was
                keys = _random_keys(len(lengths), self.seed, epoch, _DOCUMENT_ORDER)
                document_of_slot[np.argsort(lengths, kind="stable")] = np.lexsort((keys, lengths))
                sequence_order = _random_keys(len(self._bins), self.seed, epoch, _SEQUENCE_ORDER).argsort(kind="stable")
            self._layouts = dict([*self._layouts.items(), (epoch, (document_of_slot, sequence_order))][-2:])
        return self._layouts[epoch]

    def _write(self, row: dict[str, NDArray[Any]], documents: NDArray[np.int64]) -> None:
        """Write documents into one sequence, one after the other."""
        source, position = self.documents, 0
        for number, document in enumerate(documents):
            start, length = int(source.starts[document]), int(source.lengths[document])
            to, shifted = slice(position, position + length), slice(start + 1, start + length + 1)
            row["tokens"][to] = source.tokens[start : start + length]
            row["labels"][to] = np.where(source.trained[shifted] != 0, source.tokens[shifted], _IGNORED)
            if self.weighed:
                row["token_weights"][to] = source.trained[shifted]
            row["positions"][to] = np.arange(length)
            row["documents"][to] = number
            position += length


def _random_keys(count: int, seed: int, epoch: int, purpose: int) -> NDArray[np.uint64]:
    """Raw words of PCG64. They are the same in all versions of numpy, which the permutations of its Generator are not."""
    return np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose])).random_raw(count)
