"""The blocks of a stream: each is some thousand rows, tokenised. They can be made from any cursor on."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType

from mpar.data._answers import check_columns
from mpar.data._cache import Entry
from mpar.data._collect import Collector, TokeniseWorkers, refuse_malformed
from mpar.data._config import DataConfig
from mpar.data._cursor import Cursor
from mpar.data._sequences import Sequences
from mpar.data._stream_rows import StreamRows
from mpar.data._tokenise import SourcedRow, tokenise
from mpar.data._tokenizer import Tokenizer
from mpar.data._workers import Workers
from mpar.data.reading import Source
from mpar.data.rows import Row
from mpar.errors import DataError

__all__ = ["BlockMaker", "HereMade", "Stream"]

_MOST_CHARACTERS = 2**24  # of the rows of a block; tokenised, they take five times as many bytes at most, and a few times that
_NOT_COUNTED = ("malformed", "cached", "notice")


@dataclass(frozen=True)
class Stream:
    """What a stream is made of. content: a hash of everything else that the rows depend on. part: see `StreamRows`."""

    config: DataConfig
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    content: str
    part: tuple[float, bool] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the rows depend on, besides seed and order."""
        return hashlib.sha256(repr((self.content, self.part)).encode()).hexdigest()

    @property
    def beginning(self) -> Cursor:
        """Where the stream begins."""
        return Cursor.beginning(len(self.sources))


class BlockMaker:
    """Makes blocks, on `workers` processes. It goes on reading where it stopped if the next block is asked for."""

    def __init__(self, stream: Stream, workers: int) -> None:
        self._stream = stream
        self._workers: TokeniseWorkers = Workers(tokenise, (stream.config, stream.tokenizer), workers)
        self._rows: StreamRows | None = None

    def __enter__(self) -> "BlockMaker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._workers.__exit__(kind, error, trace)
        self._stream.tokenizer.close()
        self._rows = None

    def make(self, cursor: Cursor) -> Entry:
        """The block that begins at `cursor`, and the cursor behind it. A block has `shuffle_rows` rows that can be tokenised, or
        fewer long ones.

        Raises DataError if the rows are no data, and if `strict` is set and one is malformed.
        """
        config = self._stream.config
        rows = self._rows_from(cursor)
        passed_over = rows.num_passed_over
        known = cursor.report.num_used > 0  # then rows that cannot be used are no reason to stop
        collector = Collector(config, [source.name for source in self._stream.sources], self._workers, are_data=known)
        collector.add_all(self._rows_of_block(rows))
        documents, report = collector.result(num_held_out=rows.num_passed_over - passed_over)
        if config.strict and report.malformed:
            raise refuse_malformed(config, report)
        self._rows = rows
        if config.answers is not None:
            check_columns(documents, config.answers)
        multiple, answers = config.pad_to_multiple, config.answers
        laid_out = Sequences(documents, config.seq_len, packing=config.packing, pad_to_multiple=multiple, answers=answers)
        counts = asdict(cursor.report.plus(report))
        following = Cursor(
            rows.places,
            cursor.block + 1,
            cursor.sequence + len(laid_out),
            {name: value for name, value in counts.items() if name not in _NOT_COUNTED},
        )
        if following.epoch >= 2 and not following.report.num_used:
            raise DataError(f"cannot take documents from {', '.join(config.sources)}: no document is left.\n{following.report}")
        return Entry(documents, report, following.to_json())

    def _rows_from(self, cursor: Cursor) -> StreamRows:
        rows, self._rows = self._rows, None  # if making the block fails, its rows have to be read once more
        if rows is not None and rows.places == cursor.sources:
            return rows
        return StreamRows(self._stream.config, self._stream.sources, cursor.sources, self._stream.part)

    def _rows_of_block(self, rows: StreamRows) -> Iterator[SourcedRow]:
        num_rows = num_characters = 0
        while num_rows < self._stream.config.shuffle_rows and num_characters < _MOST_CHARACTERS:
            for source, row in rows.next_rows():
                if isinstance(row, Row):
                    num_rows += 1
                    num_characters += row.num_characters
                yield source, row


class HereMade:
    """Blocks that this process makes when they are asked for. Nothing is read ahead."""

    def __init__(self, stream: Stream) -> None:
        self._maker = BlockMaker(stream, workers=0)

    def get(self, cursor: Cursor) -> Entry:
        """The block that begins at a cursor."""
        return self._maker.make(cursor)

    def close(self) -> None:
        """End the process of the chat template."""
        self._maker.__exit__(None, None, None)
