"""Batches of a stream: sequences are numbered through all blocks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpar.data._batches import Batches, BatchShape
from mpar.data._documents import LoadReport
from mpar.data._stream_blocks import Stream
from mpar.data._stream_window import Block, Blocks, StreamWindow
from mpar.data._token_weights import TokenWeights
from mpar.errors import ConfigError

__all__ = ["StreamBatches"]


class StreamBatches(Batches):
    """Batches of documents that are read as they are needed. Row r of step s is sequence s * batch_size + r of the stream, whose
    sources are read over and over, so there is no last one. Each block is laid out by itself, as `Sequences` says.

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
        self.shape = BatchShape(config.batch_size, config.seq_len, config.packing, config.pad_to_multiple, config.answers)
        self.seed, self.shuffle, self.pad_id = config.seed, config.shuffle, pad_id
        self._stream, self._make_blocks, self._vocab_size, self._facts = stream, make_blocks, vocab_size, facts
        self._window = StreamWindow(stream, make_blocks(stream), vocab_size)

    @property
    def data_fingerprint(self) -> str:
        """A hash of the sources and of all settings that the rows depend on."""
        return self._stream.fingerprint

    @property
    def weighed(self) -> bool:
        """Whether tokens have weights other than 0 and 1."""
        return not TokenWeights.parse(self._stream.config.token_weights).binary

    @property
    def facts(self) -> Mapping[str, str]:
        """Hashes of sources, by name."""
        return self._facts

    @property
    def report(self) -> LoadReport:  # type: ignore[override]
        """What became of the rows that have been read so far; if none have, a block is read. Malformed ones are described since
        this object began to read."""
        return self._window.report

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The positions of the documents that are in memory."""
        return self._window.lengths

    @property
    def steps_per_epoch(self) -> None:
        """Nobody knows before all rows have been read."""
        return

    def cursor(self, step: int) -> Mapping[str, object]:
        """Where to begin reading for the batch of `step`: at the beginning of the block of its first row, if that is known."""
        return self._window.cursor(step * self.shape.batch_size)

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Begin reading at a cursor. Raises DataError if it is none of a stream with as many sources."""
        if cursor:
            self._window.go_to(cursor)

    def close(self) -> None:
        """Stop reading ahead. Reading another batch would begin it again."""
        self._window.blocks.close()

    def names(self, step: int, row: int) -> list[str]:
        """Where the documents of a row of `batch(step)` are from."""
        block, sequence = self._find(step, row)
        return block.layout.names(sequence)

    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each source, the rows and tokens that `batch(step)` has of it."""
        found: dict[str, tuple[int, int]] = {}
        for row in range(self.shape.batch_size):
            block, sequence = self._find(step, row)
            for name, (rows, tokens) in block.entry.documents.use(block.layout.documents_in(sequence)).items():
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
        return StreamBatches(stream, self._make_blocks, facts=self._facts, vocab_size=self._vocab_size, pad_id=self.pad_id)

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        block, sequence = self._find(step, row)
        block.layout.write(sequence, arrays)

    def _find(self, step: int, row: int) -> tuple[Block, int]:
        return self._window.find(step * self.shape.batch_size + row)
