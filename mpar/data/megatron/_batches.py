"""Batches of indexed tokens, in the order in which Megatron reads them."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpar.data._batches import Batches, BatchShape
from mpar.data._documents import LoadReport
from mpar.data.megatron._blend import blend, samples_for
from mpar.data.megatron._indexed import IndexedTokens
from mpar.data.megatron._samples import Samples, draw_samples
from mpar.errors import ConfigError, DataError

__all__ = ["IndexedBatches", "IndexedOptions"]


@dataclass(frozen=True)
class IndexedOptions:
    """How samples are drawn and read.

    num_samples: how many samples a run reads, on which Megatron's order depends; None: those of one epoch.
    weights:     the share of each file in a blend; None: one epoch of every file, blended by their sizes.
    vocab_size:  ids must be below it.
    eod_id:      the token that ends a document, where documents are to be kept apart: positions begin anew behind it, and
                 documents do not see each other. None: a sample is one document, as Megatron reads it by default.
    """

    vocab_size: int
    num_samples: int | None = None
    weights: tuple[float, ...] | None = None
    eod_id: int | None = None


class IndexedBatches(Batches):
    """Samples of one or several indexed files. For the same files, seed and number of samples, their order is that of Megatron's
    GPTDataset, blended as its BlendedDataset does. Row r of step s is sample s * batch_size + r; behind the last comes the first.

    span: of every file, the sequences between these shares of their number.
    Raises DataError if a file has too few tokens for a sample, ConfigError for weights that do not fit.
    """

    def __init__(
        self,
        files: Sequence[IndexedTokens],
        shape: BatchShape,
        options: IndexedOptions,
        *,
        seed: int = 0,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        _check_weights(files, options.weights)
        self.shape, self.seed, self.shuffle, self.pad_id = shape, seed, True, 0
        self._files, self._options, self._span = tuple(files), options, span
        wanted, counts = options.num_samples, [options.num_samples]
        if options.weights is not None and wanted is not None:
            wanted, counts = samples_for(options.weights, wanted)  # type: ignore[assignment]  # no count is None here
        elif len(files) > 1:
            counts = [None] * len(files)
        self._samples = [self._draw(file, count) for file, count in zip(files, counts, strict=True)]
        sizes = [len(samples) for samples in self._samples]
        self.num_samples = sum(sizes) if wanted is None or len(files) == 1 else min(wanted, sum(sizes))
        self._order = blend(options.weights or sizes, self.num_samples, sizes) if len(files) > 1 else None
        self.report = self._report()

    @property
    def data_fingerprint(self) -> str:
        """A hash of the indexes of all files and of samples of their tokens, of the blend, and of the number of samples."""
        content = (*(file.fingerprint for file in self._files), self._options, self._span)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The tokens of each sequence of the files."""
        return np.concatenate([file.lengths[slice(*self._bounds(file))] for file in self._files])

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every sample is read once."""
        return -(-self.num_samples // self.shape.batch_size)

    def split(self, fraction: float) -> tuple["IndexedBatches", "IndexedBatches"]:
        """(training, validation): the sequences of each file up to a place, and from there on, as Megatron's `split` does it."""
        if not 0 < fraction < 1:
            raise ConfigError(f"cannot split off {fraction} of the data for validation: the fraction must be in (0, 1).")
        begin, end = self._span
        middle = end - fraction * (end - begin)
        training = IndexedBatches(self._files, self.shape, self._options, seed=self.seed, span=(begin, middle))
        once = replace(self._options, num_samples=None, weights=None)
        validation = IndexedBatches(self._files, self.shape, once, seed=self.seed, span=(middle, end))
        training.report = replace(training.report, num_held_out=validation.report.num_used)
        return training, validation

    def names(self, step: int, row: int) -> list[str]:
        """The file and sequences that a row of `batch(step)` is from."""
        file, number = self._sample(step, row)
        return [f"{self._files[file].name}:{sequence}" for sequence, _, _ in self._samples[file].parts(number)]

    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each file, the samples and tokens that `batch(step)` has of it."""
        counts = Counter(self._files[self._sample(step, row)[0]].name for row in range(self.shape.batch_size))
        return {file.name: (counts[file.name], counts[file.name] * self.shape.seq_len) for file in self._files}

    def _bounds(self, file: IndexedTokens) -> tuple[int, int]:
        """The first sequence of a file that belongs to these batches, and the one behind the last."""
        begin, end = self._span
        return round(begin * file.num_sequences), round(end * file.num_sequences)

    def _sample(self, step: int, row: int) -> tuple[int, int]:
        """The file, and the number of the sample in it, of a row."""
        number = (step * self.shape.batch_size + row) % self.num_samples
        return (0, number) if self._order is None else (int(self._order[0][number]), int(self._order[1][number]))

    def _draw(self, file: IndexedTokens, count: int | None) -> Samples:
        sequences = np.arange(*self._bounds(file), dtype=np.int32)
        try:
            return draw_samples(file.lengths, sequences, seq_len=self.shape.seq_len, num_samples=count, seed=self.seed)
        except DataError as error:
            raise DataError(f"{file.name}: {error}") from None

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        tokens = self._read(*self._sample(step, row))
        arrays["tokens"][:], arrays["labels"][:] = tokens[:-1], tokens[1:]
        ends = np.zeros(0, np.int64) if self._options.eod_id is None else np.flatnonzero(tokens[:-1] == self._options.eod_id)
        begins = np.concatenate([[0], ends[ends < self.shape.seq_len - 1] + 1])
        arrays["documents"][:] = np.repeat(np.arange(len(begins)), np.diff([*begins, self.shape.seq_len]))
        arrays["positions"][:] = np.arange(self.shape.seq_len) - begins[arrays["documents"]]

    def _read(self, file: int, number: int) -> NDArray[np.int64]:
        """The seq_len + 1 tokens of a sample. Raises DataError if one is outside the vocabulary."""
        source = self._files[file]
        pieces = [source.sequence(place, offset, length) for place, offset, length in self._samples[file].parts(number)]
        tokens = np.concatenate(pieces).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._options.vocab_size:
            raise DataError(
                f"cannot train on sample {number} of {source.name}: its ids reach from {tokens.min()} to {tokens.max()}, and the "
                f"model's vocabulary has {self._options.vocab_size}.\n"
                "Use the model, or the vocabulary, that the file was written for."
            )
        return tokens

    def _report(self) -> LoadReport:
        num_sequences, num_tokens = len(self.lengths), int(self.lengths.sum(dtype=np.int64))
        return LoadReport(
            num_rows=num_sequences,
            num_used=num_sequences,
            num_documents=num_sequences,
            num_tokens=num_tokens,
            num_trained=num_tokens,
            formats={"indexed": num_sequences},
            used_of_source={file.name: int(np.diff(self._bounds(file))[0]) for file in self._files},
        )


def _check_weights(files: Sequence[IndexedTokens], weights: Sequence[float] | None) -> None:
    if weights is None:
        return
    problem = ""
    if len(weights) != len(files):
        problem = f"there are {len(weights)} weights for {len(files)} files"
    elif not all(weight >= 0 for weight in weights) or sum(weights) <= 0:
        problem = f"the weights {list(weights)} are not all at least 0, or all are 0"
    if problem:
        raise ConfigError(f"cannot blend {', '.join(file.name for file in files)}: {problem}.\nGive one weight for each source.")
