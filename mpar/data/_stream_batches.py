"""Batches of a stream: sequences are numbered through all blocks, and only the blocks of the last few steps are in memory."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpar.data._batches import Batches, BatchShape
from mpar.data._cache import Entry
from mpar.data._cursor import Cursor
from mpar.data._documents import MOST_DESCRIBED, LoadReport
from mpar.data._sequences import Layout, Sequences
from mpar.data._stream_blocks import Stream
from mpar.data.rows import BadRow
from mpar.errors import ConfigError, DataError

__all__ = ["Blocks", "StreamBatches"]

_HELD_BLOCKS = 3
_KNOWN_CURSORS = 64


class Blocks(Protocol):
    """Where the blocks of a stream come from."""

    def get(self, cursor: Cursor) -> Entry:
        """The block that begins at a cursor. Raises DataError if it cannot be made."""

    def close(self) -> None:
        """Stop making blocks ahead, until the next one is asked for."""


@dataclass(frozen=True)
class _Held:
    """A block in memory: where it begins, what it is, which sequences it has, and where the next one begins."""

    cursor: Cursor
    entry: Entry
    layout: Layout
    following: Cursor

    @cached_property
    def digest(self) -> str:
        return self.entry.documents.fingerprint


class StreamBatches(Batches):
    """Batches of documents that are read as they are needed. Row r of step s is sequence s * batch_size + r of the stream, whose
    sources are read over and over, so there is no last one. Each block is laid out by itself, as `Sequences` says.

    Steps may be asked for in any order; going back takes reading again from a cursor that is known. Several threads may read.
    make_blocks: gives what makes the blocks of a stream. facts: hashes of sources, by name.
    """

    def __init__(
        self,
        stream: Stream,
        make_blocks: Callable[[Stream], Blocks],
        *,
        vocab_size: int,
        pad_id: int,
        facts: Mapping[str, str],
    ) -> None:
        config = stream.config
        self.shape = BatchShape(config.batch_size, config.seq_len, config.packing)
        self.seed, self.shuffle, self.pad_id = config.seed, config.shuffle, pad_id
        self._stream, self._make_blocks, self._blocks = stream, make_blocks, make_blocks(stream)
        self._vocab_size, self._facts = vocab_size, facts
        self._lock = threading.RLock()
        self._known = {0: stream.beginning}
        self._held: dict[int, _Held] = {}
        self._last = stream.beginning  # behind the last block that was read, of all so far
        self._malformed: tuple[BadRow, ...] = ()

    @property
    def data_fingerprint(self) -> str:
        """A hash of the sources and of all settings that the rows depend on."""
        return self._stream.fingerprint

    @property
    def facts(self) -> Mapping[str, str]:
        """Hashes of sources, by name."""
        return self._facts

    @property
    def report(self) -> LoadReport:  # type: ignore[override]
        """What became of the rows that have been read so far; if none have, a block is read. Malformed ones are described since
        this object began to read."""
        with self._lock:
            while not any(len(held.entry.documents) for held in self._held.values()):
                self._read(self._last)
            return replace(self._last.report, malformed=self._malformed)

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The positions of the documents that are in memory."""
        with self._lock:
            return np.concatenate([np.zeros(0, np.int64), *(held.entry.documents.lengths for held in self._held.values())])

    @property
    def steps_per_epoch(self) -> None:
        """Nobody knows before all rows have been read."""
        return

    def cursor(self, step: int) -> Mapping[str, object]:
        """Where to begin reading for the batch of `step`: the beginning of its block if that has been read, else of an earlier
        one."""
        with self._lock:
            found = self._nearest(step * self.shape.batch_size)
            held = self._held.get(found.block)
            return (found if held is None else replace(found, digest=held.digest)).to_json()

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Begin reading at a cursor. Raises DataError if it is none of a stream with as many sources."""
        if not cursor:
            return
        found = Cursor.from_json(cursor)
        with self._lock:
            if len(found.sources) != len(self._stream.sources):
                raise DataError(f"cannot go on in the data: {len(found.sources)} sources were read, and now there are others.")
            self._known[found.block], self._last = found, found
            self._held, self._malformed = {}, ()

    def close(self) -> None:
        """Stop reading ahead. Reading another batch would begin it again."""
        self._blocks.close()

    def names(self, step: int, row: int) -> list[str]:
        """Where the documents of a row of `batch(step)` are from."""
        held, sequence = self._place(step, row)
        return held.layout.names(sequence)

    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each source, the rows and tokens that `batch(step)` has of it."""
        found: dict[str, tuple[int, int]] = {}
        for row in range(self.shape.batch_size):
            held, sequence = self._place(step, row)
            for name, (rows, tokens) in held.entry.documents.use(held.layout.documents_in(sequence)).items():
                before_rows, before_tokens = found.get(name, (0, 0))
                found[name] = before_rows + rows, before_tokens + tokens
        return found

    def split(self, fraction: float) -> tuple["StreamBatches", "StreamBatches"]:
        """(training, validation): about `fraction` of the rows go to validation, which is not shuffled. The choice depends on the
        places of rows in their files alone. Raises ConfigError if `fraction` is not in (0, 1).
        """
        if not 0 < fraction < 1:
            raise ConfigError(f"cannot split off {fraction} of the data for validation: the fraction must be in (0, 1).")
        return self._part(fraction, False), self._part(fraction, True)

    def _part(self, fraction: float, chosen: bool) -> "StreamBatches":
        config = replace(self._stream.config, shuffle=self.shuffle and not chosen)
        stream = replace(self._stream, config=config, part=(fraction, chosen))
        others = {"vocab_size": self._vocab_size, "pad_id": self.pad_id}
        return StreamBatches(stream, self._make_blocks, facts=self._facts, **others)

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[np.int64]]) -> None:
        held, sequence = self._place(step, row)
        held.layout.write(sequence, arrays)

    def _place(self, step: int, row: int) -> tuple[_Held, int]:
        """The block in which a row is, and its sequence in that block."""
        sequence = step * self.shape.batch_size + row
        with self._lock:
            cursor = self._nearest(sequence)
            while True:
                held = self._held.get(cursor.block) or self._read(cursor)
                if sequence < held.following.sequence:
                    return held, sequence - held.cursor.sequence
                cursor = held.following

    def _nearest(self, sequence: int) -> Cursor:
        """The last of the known cursors that is not behind a sequence."""
        return max((known for known in self._known.values() if known.sequence <= sequence), key=lambda known: known.block)

    def _read(self, cursor: Cursor) -> _Held:
        """Read a block, remember it and where the next begins, and forget the oldest ones."""
        entry = self._blocks.get(cursor)
        entry.documents.check_ids(self._vocab_size)
        assert entry.following is not None
        following = Cursor.from_json(entry.following)
        sequences = Sequences(entry.documents, self.shape.seq_len, packing=self.shape.packing)
        held = _Held(cursor, entry, sequences.layout(self.seed, cursor.block, shuffle=self.shuffle), following)
        if cursor.digest not in ("", held.digest):
            raise DataError(
                f"cannot go on in the data: other rows are in the files than when the checkpoint was written, where block "
                f"{cursor.block} begins: {_places(cursor)}.\nRestore the files, or begin their order anew: resume.data=restart."
            )
        self._held = dict([*self._held.items(), (cursor.block, held)][-_HELD_BLOCKS:])
        first, *others = {**self._known, following.block: following}.values()
        self._known = {known.block: known for known in (first, *others[-_KNOWN_CURSORS:])}
        if following.block > self._last.block:
            self._last = following
            self._malformed = (*self._malformed, *entry.report.malformed)[:MOST_DESCRIBED]
        return held


def _places(cursor: Cursor) -> str:
    """The places of a cursor, as a person reads them."""
    return ", ".join(
        f"source {number}: file {place.file}, row {place.mark.records + 1}" for number, place in enumerate(cursor.sources)
    )
