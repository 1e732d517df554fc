"""Collects the documents of rows, and counts what became of each row."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpar.data._answers import with_mismatched
from mpar.data._chunks import chunks
from mpar.data._config import DataConfig
from mpar.data._documents import DESCRIBED_ROWS, Documents, LoadReport
from mpar.data._kept import Kept
from mpar.data._mix import choose, documents_of, rows_by_weight
from mpar.data._tokenise import RowTokens, SourcedRow, Tokenise
from mpar.data._workers import Workers
from mpar.data.reading import Source
from mpar.data.rows import BadRow, Columns, EmptyRow, FilteredRow, MediaRow, Row, read_rows
from mpar.errors import DataError

__all__ = ["Collector", "Progress", "TokeniseWorkers", "collect", "refuse_malformed"]

Progress = Callable[[int, int], None]
"""A function that is called now and then with (rows read, tokens made) so far."""

TokeniseWorkers = Workers[Tokenise, Sequence[SourcedRow], Iterable[RowTokens]]
"""Processes that carry out `tokenise`."""

_ROWS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 2**23
_MOST_OF_REASON = 500  # characters
_MOST_LISTED = 10  # malformed rows in an error
_ENOUGH_MALFORMED = 1000  # malformed rows before any that can be used: this is no data


def collect(
    config: DataConfig, sources: Sequence[Source], workers: TokeniseWorkers, progress: Progress | None
) -> tuple[Documents, LoadReport]:
    """The documents of all rows of all sources that can be used, in the shares that the weights say, and what became of the rows.

    Raises DataError as soon as it is clear that the rows are no data.
    """
    columns = Columns(config.columns, config.preprocess)
    collector = Collector(config, [source.name for source in sources], workers, progress, columns=columns)
    collector.add_all((number, row) for number, source in enumerate(sources) for row in read_rows(config.kind, source, columns))
    documents, report = collector.result()
    if not len(documents):
        raise collector.no_documents("no document is left")
    return (documents, report) if config.weights is None else _mixed(collector, config, documents, report)


def refuse_malformed(config: DataConfig, report: LoadReport) -> DataError:
    """The error because there are malformed rows and `strict` is set."""
    listed = "\n".join(f"  {row}" for row in report.malformed[:_MOST_LISTED])
    return DataError(
        f"cannot train on {', '.join(config.sources)} with data.strict=true: there are malformed rows. The first:\n{listed}\n"
        "Correct or delete them; data.strict=false leaves malformed rows out and lists them in malformed.jsonl."
    )


class Collector:
    """The documents of the rows that were added, and the counts.

    source_names: of the sources that rows name by number. are_data: it is known that these sources are data, so reading does not
    stop, however many rows are malformed. columns: those that the rows are read with, if it shall be told which rows have them.
    """

    def __init__(
        self,
        config: DataConfig,
        source_names: Sequence[str],
        workers: TokeniseWorkers,
        progress: Progress | None = None,
        *,
        are_data: bool = False,
        columns: Columns | None = None,
    ) -> None:
        self._config, self._workers, self._progress, self._are_data = config, workers, progress, are_data
        self._columns = columns
        self._kept = Kept(source_names)
        self._counts: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._used = [0] * len(source_names)  # rows of each source
        self._bad_rows: list[BadRow] = []

    def add_all(self, rows: Iterable[SourcedRow]) -> None:
        """Add every row that can be used, and count all of them."""
        for chunk, outcomes in self._workers.map(chunks(rows, lambda item: item[1], _ROWS_AT_ONCE, _CHARACTERS_AT_ONCE)):
            self._add(chunk, iter(outcomes))
            if self._progress is not None:
                self._progress(self._counts["num_rows"], self._kept.num_tokens)
            if self._config.strict and self._counts["num_malformed"] >= _MOST_LISTED:
                raise refuse_malformed(self._config, self._report())
            if self._counts["num_malformed"] >= _ENOUGH_MALFORMED and not (self._counts["num_used"] or self._are_data):
                raise self.no_documents("every row so far is malformed, and reading stopped")

    def result(self, *, num_held_out: int = 0) -> tuple[Documents, LoadReport]:
        """The documents, and what became of the rows. num_held_out: rows that were not added, to evaluate on them."""
        documents, answers = self._kept.documents(), self._config.answers
        if answers is not None and answers.mismatched and len(documents):
            documents = with_mismatched(documents, self._config.seq_len, self._config.pad_to_multiple)
        return documents, replace(self._report().of(documents), num_held_out=num_held_out)

    def no_documents(self, problem: str) -> DataError:
        """The error because the rows give no data."""
        return DataError(f"cannot take documents from {', '.join(self._config.sources)}: {problem}.\n{self._report()}")

    def _add(self, chunk: Sequence[SourcedRow], outcomes: Iterator[RowTokens]) -> None:
        self._counts["num_rows"] += len(chunk)
        for source, row in chunk:
            if isinstance(row, Row):
                self._add_row(source, row, next(outcomes))
            elif isinstance(row, BadRow):
                self._malformed(row)
            elif isinstance(row, EmptyRow):
                self._counts["num_empty"] += 1
            elif isinstance(row, MediaRow):
                self._counts["num_media"] += 1
            elif isinstance(row, FilteredRow):
                self._counts["num_filtered"] += 1

    def _add_row(self, source: int, row: Row, made: RowTokens) -> None:
        self._counts["num_too_long"] += made.too_long
        if made.fault:
            self._malformed(row.malformed(made.fault))
        elif not made.documents:
            self._counts["num_dropped"] += 1
        else:
            self._counts["num_used"] += 1
            self._formats[row.format] += 1
            self._used[source] += 1
            self._kept.add(source, row, made)

    def _malformed(self, row: BadRow) -> None:
        self._counts["num_malformed"] += 1
        if len(self._bad_rows) < DESCRIBED_ROWS:
            self._bad_rows.append(replace(row, reason=row.reason[:_MOST_OF_REASON]))

    def _report(self) -> LoadReport:
        used_of: Counter[str] = Counter()
        for name, count in zip(self._kept.source_names, self._used, strict=True):
            used_of[name] += count  # a source may be named twice
        counts: dict[str, Any] = dict(self._counts)
        described = tuple(self._bad_rows)
        found = {} if self._columns is None else {name: self._columns.met[name] for name in self._columns.names}
        parts: dict[str, Any] = {"formats": dict(self._formats), "used_of_source": dict(used_of), "rows_of_column": found}
        return LoadReport(**counts, malformed=described, **parts)


def _mixed(collector: Collector, config: DataConfig, documents: Documents, report: LoadReport) -> tuple[Documents, LoadReport]:
    """The documents of as many rows of each source as the weights say."""
    assert config.weights is not None
    of_source = [np.flatnonzero(documents.sources == number) for number in range(len(documents.source_names))]
    rows = [np.unique(documents.rows[places]) for places in of_source]
    empty = [name for name, present in zip(documents.source_names, rows, strict=True) if not len(present)]
    if empty:
        raise collector.no_documents(f"{', '.join(empty)} has no row that can be used, and data.weights asks for some")
    sizes = [len(present) for present in rows]
    counts = rows_by_weight(config.weights, sizes, config.stop)
    chosen = [present[choose(count, len(present))] for count, present in zip(counts, rows, strict=True)]
    parts = [places[documents_of(documents.rows[places], taken)] for places, taken in zip(of_source, chosen, strict=True)]
    mixed = documents.take(np.concatenate(parts))
    num_unmixed = sum(max(0, size - count) for count, size in zip(counts, sizes, strict=True))
    used_of: Counter[str] = Counter()
    for name, count, size in zip(documents.source_names, counts, sizes, strict=True):
        used_of[name] += min(count, size)
    changed = replace(
        report,
        num_used=report.num_used - num_unmixed,
        num_unmixed=num_unmixed,
        num_repeated=sum(max(0, count - size) for count, size in zip(counts, sizes, strict=True)),
        used_of_source=dict(used_of),
    )
    return mixed, changed.of(mixed)
