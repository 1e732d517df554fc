"""Global batches by the number of their step: a pure function of the data, the seed and the step, never of the mesh."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpar.data._answers import Answers, check_columns
from mpar.data._documents import Documents, LoadReport
from mpar.data._random import SPLIT, random_keys
from mpar.data._sequences import IGNORED, Layout, Sequences
from mpar.errors import ConfigError, DataError

__all__ = ["BatchShape", "Batches", "DocumentBatches"]


@dataclass(frozen=True)
class BatchShape:
    """`batch_size` sequences of `seq_len` positions in every step. With `packing`, a sequence may hold several documents, each of
    which begins at a multiple of `pad_to_multiple`. answers: what is said of documents besides, for tasks that compare them.
    """

    batch_size: int
    seq_len: int
    packing: bool = True
    pad_to_multiple: int = field(default=1, repr=False)  # so that fingerprints are those of before there was this
    answers: Answers | None = field(default=None, repr=False)


class Batches(ABC):
    """Random access to global batches: each is a function of the data and of the number of its step.

    Where making the batch of a late step would take reading all data before it, a cursor tells where to begin reading: that of
    `cursor(step)`, which a run keeps and gives to `go_to` when it goes on. It changes no batch.

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
        content = [self.data_fingerprint, self.shape, self.seed, self.shuffle, self.pad_id]
        content += [self.shape.pad_to_multiple] * (self.shape.pad_to_multiple > 1)
        content += [self.shape.answers] * (self.shape.answers is not None)
        return hashlib.sha256(repr(tuple(content)).encode()).hexdigest()

    @property
    @abstractmethod
    def data_fingerprint(self) -> str:
        """A hash of the data alone."""

    @property
    def weighed(self) -> bool:
        """Whether labels weigh more or less than 1, so that batches say how much."""
        return False

    @property
    def reads_ahead(self) -> bool:
        """Whether the batch of a step can be read before the steps before it are done."""
        return True

    def begin(self, step: int, params: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Called before the batch of `step` is read, unless batches can be read ahead, with the parameters at that time: tensors
        by path, as this rank has them. Returns what a record of the step should have of it, by name.
        """
        return {}

    def end(self, step: int, means: Mapping[str, float]) -> None:
        """Called after the update of `step`, with the metrics of its task, which batches that depend on parameters check."""
        return

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.integer]:
        """The positions that each document takes, (documents,)."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """The number of steps that feed all data once; None if that is not known, since the data are read as they are needed."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What `data_fingerprint` is made of, as hashes with names, where a part of the data can be told by name."""
        return {}

    def cursor(self, step: int) -> Mapping[str, object]:
        """Where to begin reading for the batch of `step`; nothing if any batch can be read at once."""
        return {}

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Begin reading at a cursor, so that batches from its step on come soon. Raises DataError if it is none of these data."""
        if cursor:
            raise DataError(
                f"cannot go on in the data: any batch of them can be read at once, without the cursor {cursor!r:.200}."
            )

    def close(self) -> None:
        """End the processes that read ahead, if there are any. Reading another batch would start them again."""
        return

    @abstractmethod
    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each source, the rows and tokens that `batch(step)` has of it. A row that was cut into documents counts
        where its first one is.
        """

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of `step`, in int64, (batch_size, seq_len). Steps are counted from 0 through all epochs.

        tokens:     ids of tokens; padding has the padding id.
        labels:     the next token where it is trained on, else -100.
        positions:  from 0 in each document; 0 in padding.
        documents:  0, 1, ... within a sequence; -1 in padding.
        token_weights: if `weighed`, what each label weighs in the loss, in float32.
        Others that `shape.answers` names.
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
        fills = {"tokens": self.pad_id, "labels": IGNORED, "positions": 0, "documents": -1}
        size = (len(rows), self.shape.seq_len)
        arrays: dict[str, NDArray[Any]] = {name: np.full(size, value, dtype=np.int64) for name, value in fills.items()}
        if self.shape.answers is not None:
            arrays |= self.shape.answers.arrays(*size)
        elif self.weighed:
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

    An epoch feeds every document once, and never cuts one; `Sequences` says in which order. The last batch of an epoch is filled
    up with sequences of padding, which have no labels.

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
        sizes = Sequences.sizes(documents, shape.pad_to_multiple)
        too_long = np.flatnonzero(sizes > shape.seq_len)
        if len(too_long):
            name, length = documents.names[documents.rows[too_long[0] * documents.together]], sizes[too_long[0]]
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
        if shape.answers is not None:
            check_columns(documents, shape.answers)
        self._sequences = Sequences(
            documents,
            shape.seq_len,
            packing=shape.packing,
            pad_to_multiple=shape.pad_to_multiple,
            answers=shape.answers,
        )
        self._layouts: dict[int, Layout] = {}

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

    def documents_in(self, step: int, row: int) -> NDArray[np.int64]:
        """Which documents a row of `batch(step)` holds, in order."""
        layout, sequence = self._place(step, row)
        return layout.documents_in(sequence)

    def in_order(self, batch_size: int) -> "DocumentBatches":
        """The same sequences without shuffling, so many in a batch."""
        return self._of(self.documents, replace(self.shape, batch_size=batch_size), False, self.report)

    def with_reference_logps(self, logps: NDArray[np.float32]) -> "DocumentBatches":
        """The same batches, with the log-probability of each document's answer by a reference model, (documents,)."""
        return self._of(replace(self.documents, reference_logps=logps), self.shape, self.shuffle, self.report)

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch that hold a document."""
        return len(self._sequences)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps that feed every document once."""
        return -(-len(self._sequences) // self.shape.batch_size)

    @property
    def fill_ratio(self) -> float:
        """The share of positions that hold a document, in the sequences that hold any."""
        return float(self.documents.lengths.sum()) / (self.num_sequences * self.shape.seq_len)

    def names(self, step: int, row: int) -> list[str]:
        """Where the documents of a row of `batch(step)` are from."""
        layout, sequence = self._place(step, row)
        return layout.names(sequence)

    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each source, the rows and tokens that `batch(step)` has of it."""
        found: list[NDArray[np.int64]] = []
        for row in range(self.shape.batch_size):
            layout, sequence = self._place(step, row)
            found.append(layout.documents_in(sequence))
        return self.documents.use(np.concatenate(found))

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        layout, sequence = self._place(step, row)
        layout.write(sequence, arrays)

    def _place(self, step: int, row: int) -> tuple[Layout, int]:
        """The layout of the epoch, and the number in it of the sequence that is a row. Two layouts are remembered."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch not in self._layouts:
            made = self._sequences.layout(self.seed, epoch, shuffle=self.shuffle)
            self._layouts = dict([*self._layouts.items(), (epoch, made)][-2:])
        return self._layouts[epoch], step_in_epoch * self.shape.batch_size + row

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
        held_out = np.sort(present[random_keys(len(present), key, 0, SPLIT).argsort(kind="stable")[:count]])
        training = np.setdiff1d(present, held_out, assume_unique=True)
        report = replace(self.report, num_held_out=count)
        return self._subset(training, self.shuffle, report), self._subset(held_out, False, report)

    def only(self, documents: NDArray[np.int64], report: LoadReport) -> "DocumentBatches":
        """Batches of these documents alone, by their indices, in this order; `report` is on their rows."""
        return self._of(self.documents.take(documents), self.shape, self.shuffle, report)

    def _subset(self, rows: NDArray[np.int64], shuffle: bool, report: LoadReport) -> "DocumentBatches":
        return self._of(self.documents.select(rows), self.shape, shuffle, report)

    def _of(self, documents: Documents, shape: BatchShape, shuffle: bool, report: LoadReport) -> "DocumentBatches":
        return DocumentBatches(
            documents,
            shape,
            vocab_size=self._vocab_size,
            pad_id=self.pad_id,
            seed=self.seed,
            shuffle=shuffle,
            report=report,
        )
