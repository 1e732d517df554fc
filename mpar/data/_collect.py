"""Tokenises rows, collects their documents, and counts what became of each row."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from mpar.data._config import DataConfig
from mpar.data._documents import Documents, LoadReport
from mpar.data._kept import Kept
from mpar.data._mix import choose, rows_by_weight
from mpar.data._template import Message, TemplateError
from mpar.data._token_weights import TokenWeights
from mpar.data._tokenizer import Tokenizer
from mpar.data.reading import Source
from mpar.data.rows import AnyRow, BadRow, Columns, EmptyRow, FilteredRow, MediaRow, Row, read_rows
from mpar.errors import DataError

__all__ = ["Collector", "Progress", "refuse_malformed"]

Progress = Callable[[int, int], None]
"""A function that is called now and then with (rows read, tokens made) so far."""

_ROWS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 2**23
_MOST_REPORTED = 10_000  # malformed rows that the report describes; it counts all
_MOST_OF_REASON = 500  # characters
_MOST_LISTED = 10  # malformed rows in an error
_ENOUGH_MALFORMED = 1000  # malformed rows before any that can be used: this is no data


def refuse_malformed(config: DataConfig, report: LoadReport) -> DataError:
    """The error because there are malformed rows and `strict` is set."""
    listed = "\n".join(f"  {row}" for row in report.malformed[:_MOST_LISTED])
    return DataError(
        f"cannot train on {', '.join(config.sources)} with data.strict=true: there are malformed rows. The first:\n{listed}\n"
        "Correct or delete them; data.strict=false leaves malformed rows out and lists them in malformed.jsonl."
    )


class Collector:
    """Reads all sources once."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, progress: Progress | None):
        self.config, self.tokenizer, self.progress = config, tokenizer, progress
        self.kept = Kept()
        self.counts: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.used_of: dict[str, int] = {}  # rows used of each source, in the order of sources
        self.bad_rows: list[BadRow] = []

    def run(self, sources: Sequence[Source]) -> tuple[Documents, LoadReport]:
        """The documents of all rows that can be used. Raises DataError as soon as it is clear that the rows are no data."""
        ends = []
        try:
            for source in sources:
                before = self.counts["num_used"]
                self.add_all(read_rows(self.config.kind, source, Columns(self.config.columns, self.config.preprocess)))
                self.used_of[source.name] = self.used_of.get(source.name, 0) + self.counts["num_used"] - before
                ends.append(len(self.kept.starts))
        finally:
            self.tokenizer.close()
        if not self.kept.starts:
            raise self.no_documents("no document is left")
        documents = self.kept.documents()
        if self.config.weights is None:
            return documents, self.report(documents)
        mixed = self.mixed(documents, sources, ends)
        return mixed, self.report(mixed)

    def mixed(self, documents: Documents, sources: Sequence[Source], ends: Sequence[int]) -> Documents:
        """The documents of as many rows of each source as the weights say."""
        rows_of = [documents.rows[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        present = [np.unique(rows) for rows in rows_of]
        empty = [source.name for source, rows in zip(sources, present, strict=True) if not len(rows)]
        if empty:
            raise self.no_documents(f"{', '.join(empty)} has no row that can be used, and data.weights asks for some")
        assert self.config.weights is not None
        counts = rows_by_weight(self.config.weights, [len(rows) for rows in present], self.config.stop)
        chosen = [rows[choose(count, len(rows))] for count, rows in zip(counts, present, strict=True)]
        self.counts["num_repeated"] = sum(max(0, count - len(rows)) for count, rows in zip(counts, present, strict=True))
        self.counts["num_unmixed"] = sum(max(0, len(rows) - count) for count, rows in zip(counts, present, strict=True))
        self.counts["num_used"] -= self.counts["num_unmixed"]
        self.used_of = {source.name: min(count, len(rows)) for source, count, rows in zip(sources, counts, present, strict=True)}
        return documents.take(np.concatenate(chosen))

    def add_all(self, rows: Iterable[AnyRow]) -> None:
        """Add every row that can be used."""
        for usable in self.batches_of_usable(rows):
            (self.add_texts if self.config.kind == "pt" else self.add_conversations)(usable)
            if self.progress is not None:
                self.progress(self.counts["num_rows"], self.kept.num_tokens)
            if self.config.strict and self.counts["num_malformed"] >= _MOST_LISTED:
                raise refuse_malformed(self.config, self.report(None))
            if self.counts["num_malformed"] >= _ENOUGH_MALFORMED and not self.counts["num_used"]:
                raise self.no_documents("every row so far is malformed, and reading stopped")

    def no_documents(self, problem: str) -> DataError:
        return DataError(f"cannot train on {', '.join(self.config.sources)}: {problem}.\n{self.report(None)}")

    def batches_of_usable(self, rows: Iterable[AnyRow]) -> Iterator[list[Row]]:
        """Count rows, and yield those that can be tokenised in batches of some hundred rows and a few million characters."""
        usable: list[Row] = []
        num_rows = num_characters = 0
        for row in rows:
            num_rows += 1
            if self.usable(row):
                usable.append(row)
                num_characters += row.num_characters
            if num_rows == _ROWS_AT_ONCE or num_characters > _CHARACTERS_AT_ONCE:
                yield usable
                usable, num_rows, num_characters = [], 0, 0
        if num_rows:
            yield usable

    def report(self, documents: Documents | None) -> LoadReport:
        """What became of the rows; `documents` are those of the result, None before there is one."""
        lengths = np.zeros(0, np.int64) if documents is None else documents.lengths
        return LoadReport(
            num_rows=self.counts["num_rows"],
            num_used=self.counts["num_used"],
            num_malformed=self.counts["num_malformed"],
            num_empty=self.counts["num_empty"],
            num_media=self.counts["num_media"],
            num_filtered=self.counts["num_filtered"],
            num_too_long=self.counts["num_too_long"],
            num_dropped=self.counts["num_dropped"],
            num_unmixed=self.counts["num_unmixed"],
            num_repeated=self.counts["num_repeated"],
            malformed=tuple(self.bad_rows),
            num_documents=len(lengths),
            num_tokens=int(lengths.sum()),
            num_trained=0 if documents is None else documents.num_trained,
            formats=dict(self.formats),
            used_of_source=dict(self.used_of),
        )

    def usable(self, row: AnyRow) -> TypeGuard[Row]:
        """Count the row. Returns whether it can be tokenised."""
        self.counts["num_rows"] += 1
        if isinstance(row, BadRow):
            self.malformed(row)
        elif isinstance(row, EmptyRow):
            self.counts["num_empty"] += 1
        elif isinstance(row, MediaRow):
            self.counts["num_media"] += 1
        elif isinstance(row, FilteredRow):
            self.counts["num_filtered"] += 1
        return isinstance(row, Row)

    def malformed(self, row: BadRow) -> None:
        self.counts["num_malformed"] += 1
        if len(self.bad_rows) < _MOST_REPORTED:
            self.bad_rows.append(replace(row, reason=row.reason[:_MOST_OF_REASON]))

    def add_texts(self, rows: Sequence[Row]) -> None:
        """Add each text, ended by the end-of-text token, as documents of at most seq_len positions."""
        eos_id = self.tokenizer.eos_id
        texts = [_substitute(row.text, row.text, self.config) for row in rows]
        for row, ids in zip(rows, self.tokenizer.encode_batch(texts, add_special_tokens=True), strict=True):
            ended = ids if ids and ids[-1] == eos_id else [*ids, eos_id]
            if len(ended) < 2:
                self.malformed(row.malformed("no token"))
                continue
            base = self.append(row, np.array(ended, dtype=np.int32), np.ones(len(ended), dtype=bool))
            for start in range(0, len(ended) - 1, self.config.seq_len):
                self.kept.add_document(row, base + start, min(self.config.seq_len, len(ended) - 1 - start))

    def add_conversations(self, rows: Sequence[Row]) -> None:
        """Add each conversation as one document, with labels on what the assistant wrote."""
        conversations = [(_prepare(row.messages, self.config), row.tools) for row in rows]
        encodings = self.tokenizer.encode_chats(conversations, weights=TokenWeights.parse(self.config.token_weights))
        for row in rows:
            try:
                encoded = next(encodings)
            except TemplateError as error:
                raise TemplateError(f"{row.where}: {error}") from error
            if isinstance(encoded, DataError):
                self.malformed(row.malformed(str(encoded)))
            else:
                self.add_conversation(row, *encoded)

    def add_conversation(self, row: Row, ids: Sequence[int], trained: Sequence[float]) -> None:
        """Add a conversation, cut as `truncation` says if it is too long."""
        if not any(trained[1:]):
            self.malformed(row.malformed("no token to train on: the chat template renders no answer, or none has a loss"))
            return
        if len(ids) > self.config.seq_len + 1:
            self.counts["num_too_long"] += 1
            if self.config.truncation == "error":
                raise DataError(
                    f"cannot use {row.where}: its conversation has {len(ids)} tokens, {self.config.seq_len + 1} fit into seq_len="
                    f"{self.config.seq_len}. Raise seq_len, or set truncation to drop, left, right or split."
                )
        pieces = [piece for piece in _pieces(len(ids), self.config) if any(trained[piece.start + 1 : piece.stop])]
        if not pieces:
            self.counts["num_dropped"] += 1
            return
        dtype = np.bool_ if TokenWeights.parse(self.config.token_weights).binary else np.float32
        base = self.append(row, np.array(ids, dtype=np.int32), np.array(trained, dtype=dtype))
        for piece in pieces:
            self.kept.add_document(row, base + piece.start, piece.stop - piece.start - 1)

    def append(self, row: Row, ids: NDArray[np.int32], trained: NDArray[np.bool_ | np.float32]) -> int:
        """Count a row as used and add its tokens; returns the index of the first."""
        self.counts["num_used"] += 1
        self.formats[row.format] += 1
        return self.kept.append(row, ids, trained)


def _pieces(size: int, config: DataConfig) -> list[slice]:
    """The tokens that become documents, of a conversation of `size` tokens. Documents that were cut from one share a token."""
    longest = config.seq_len + 1
    if size <= longest:
        return [slice(0, size)]
    if config.truncation == "right":
        return [slice(0, longest)]
    if config.truncation == "left":
        return [slice(size - longest, size)]
    if config.truncation == "split":
        return [slice(start, min(start + longest, size)) for start in range(0, size - 1, config.seq_len)]
    return []


def _prepare(messages: Sequence[Message], config: DataConfig) -> list[Message]:
    """The messages, with `config.system` if they have no system message, and with names in place of placeholders."""
    if config.system is not None and all(message["role"] not in ("system", "developer") for message in messages):
        messages = [{"role": "system", "content": config.system}, *messages]
    full_text = "".join(str(message["content"]) for message in messages)
    return [{**message, "content": _substitute(str(message["content"]), full_text, config)} for message in messages]


def _substitute(text: str, row: str, config: DataConfig) -> str:
    """`text` with model_name and model_author put in: the Chinese ones if `row` has any Chinese character."""
    which = 0 if re.search("[\u4e00-\u9fff]", row) else 1
    for placeholder, value in (("{{NAME}}", config.model_name), ("{{AUTHOR}}", config.model_author)):
        if value is not None:
            text = text.replace(placeholder, value if isinstance(value, str) else value[which])
    return text
