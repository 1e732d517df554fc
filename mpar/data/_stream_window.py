"""The part of a stream that is in memory: the last few blocks that were read, and the cursors that are known."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpar.data._cache import Entry
from mpar.data._cursor import Cursor
from mpar.data._documents import DESCRIBED_ROWS, LoadReport
from mpar.data._sequences import Layout, Sequences
from mpar.data._stream_blocks import Stream
from mpar.data.rows import BadRow
from mpar.errors import DataError

__all__ = ["Block", "Blocks", "StreamWindow"]

_HELD_BLOCKS = 3
_KNOWN_CURSORS = 64


class Blocks(Protocol):
    """Where the blocks of a stream come from."""

    def get(self, cursor: Cursor) -> Entry:
        """The block that begins at a cursor. Raises DataError if it cannot be made."""

    def close(self) -> None:
        """Stop making blocks ahead, until the next one is asked for."""


@dataclass(frozen=True)
class Block:
    """A block in memory: where it begins, what it is, which sequences it has, and where the next one begins."""

    cursor: Cursor
    entry: Entry
    layout: Layout
    following: Cursor

    @cached_property
    def digest(self) -> str:
        """A hash of its documents."""
        return self.entry.documents.fingerprint


class StreamWindow:
    """Finds the block of any sequence. Going on is reading the next block; going back is reading again from a cursor that is
    known, if the block is no longer in memory. Several threads may ask. Ids must be below `vocab_size`.
    """

    def __init__(self, stream: Stream, blocks: Blocks, vocab_size: int) -> None:
        self.blocks = blocks
        self._stream, self._vocab_size = stream, vocab_size
        self._lock = threading.RLock()
        self._known = {0: stream.beginning}
        self._held: dict[int, Block] = {}
        self._behind = stream.beginning  # behind the hindmost block that has been read
        self._malformed: tuple[BadRow, ...] = ()

    @property
    def report(self) -> LoadReport:
        """What became of the rows that have been read so far; if there is no document yet, blocks are read until there is one.
        Malformed rows are described since this object began to read."""
        with self._lock:
            while not any(len(held.entry.documents) for held in self._held.values()):
                self._read(self._behind)
            return replace(self._behind.report, malformed=self._malformed)

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The positions of the documents in memory."""
        with self._lock:
            return np.concatenate([np.zeros(0, np.int64), *(held.entry.documents.lengths for held in self._held.values())])

    def find(self, sequence: int) -> tuple[Block, int]:
        """The block that has a sequence of the stream, and which of its sequences it is."""
        with self._lock:
            cursor = self._nearest(sequence)
            while True:
                held = self._held.get(cursor.block) or self._read(cursor)
                if sequence < held.following.sequence:
                    return held, sequence - held.cursor.sequence
                cursor = held.following

    def cursor(self, sequence: int) -> Mapping[str, object]:
        """Where to begin reading for a sequence: the beginning of its block if that is known, else of an earlier one."""
        with self._lock:
            found = self._nearest(sequence)
            held = self._held.get(found.block)
            return (found if held is None else replace(found, digest=held.digest)).to_json()

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Begin reading at a cursor. Raises DataError if it is none of a stream with as many sources."""
        found = Cursor.from_json(cursor)
        with self._lock:
            if len(found.sources) != len(self._stream.sources):
                raise DataError(f"cannot go on in the data: {len(found.sources)} sources were read, and now there are others.")
            self._known[found.block], self._behind = found, found
            self._held, self._malformed = {}, ()

    def _nearest(self, sequence: int) -> Cursor:
        """The last of the known cursors that is not behind a sequence."""
        return max((known for known in self._known.values() if known.sequence <= sequence), key=lambda known: known.block)

    def _read(self, cursor: Cursor) -> Block:
        """Read a block, remember it and where the next begins, and forget the oldest ones."""
        config, entry = self._stream.config, self.blocks.get(cursor)
        entry.documents.check_ids(self._vocab_size)
        assert entry.following is not None
        following = Cursor.from_json(entry.following)
        multiple = config.pad_to_multiple
        sequences = Sequences(
            entry.documents, config.seq_len, packing=config.packing, pad_to_multiple=multiple, answers=config.answers
        )
        held = Block(cursor, entry, sequences.layout(config.seed, cursor.block, shuffle=config.shuffle), following)
        if cursor.digest not in ("", held.digest):
            raise DataError(
                f"cannot go on in the data: other rows are in the files than when the checkpoint was written, where block "
                f"{cursor.block} begins: {cursor}.\nRestore the files, or begin their order anew: resume.data=restart."
            )
        self._held = dict([*self._held.items(), (cursor.block, held)][-_HELD_BLOCKS:])
        first, *others = {**self._known, following.block: following}.values()
        self._known = {known.block: known for known in (first, *others[-_KNOWN_CURSORS:])}
        if following.block > self._behind.block:
            self._behind = following
            self._malformed = (*self._malformed, *entry.report.malformed)[:DESCRIBED_ROWS]
        return held
