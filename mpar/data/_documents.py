"""Tokenised documents in flat arrays: many millions of tokens in a few allocations, memory-mapped when they come from a cache."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpar.data.rows import BadRow
from mpar.errors import DataError, brief

__all__ = ["DESCRIBED_ROWS", "Documents", "LoadReport"]

DESCRIBED_ROWS = 10_000
"""Malformed rows that a report describes. It counts all."""


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows that were read. No row is left out silently: each is used, empty, malformed or dropped."""

    num_rows: int = 0  # rows or files seen
    num_used: int = 0  # rows that became at least one document
    num_malformed: int = 0
    malformed: tuple[BadRow, ...] = ()  # the first ten thousand of them
    num_empty: int = 0  # plain text without a character
    num_media: int = 0  # rows with images, sound or video, which are left out
    num_filtered: int = 0  # rows that the user's own function left out
    num_too_long: int = 0  # rows longer than a sequence, which are treated as `truncation` says
    num_dropped: int = 0  # rows that were too long and left out
    num_unmixed: int = 0  # rows that were left out because of the weights of sources
    num_repeated: int = 0  # rows that were added once more because of these weights
    num_documents: int = 0
    num_tokens: int = 0  # positions that documents take in sequences
    num_trained: int = 0  # those of these positions that have a label
    formats: dict[str, int] = field(default_factory=dict)  # used rows of each detected format
    used_of_source: dict[str, int] = field(default_factory=dict)  # used rows of each source
    tokens_of_source: dict[str, int] = field(default_factory=dict)  # positions of its documents
    rows_of_column: dict[str, int] = field(default_factory=dict)  # rows with each column that the user has renamed
    num_held_out: int = 0  # used rows that are evaluated on and not trained on; 0 if the data were not split
    cached: bool = False  # read from the cache; the numbers are those of the run that wrote it
    notice: str = ""  # why the entry of the cache was not used; empty if there was none, or it was used

    def of(self, documents: "Documents") -> "LoadReport":
        """This report with the numbers of `documents`, which the rows became."""
        tokens_of: Counter[str] = Counter()
        for name, tokens in zip(documents.source_names, documents.tokens_of_source, strict=True):
            tokens_of[name] += int(tokens)  # a source may be named twice
        return replace(
            self,
            num_documents=len(documents),
            num_tokens=int(documents.lengths.sum()),
            num_trained=documents.num_trained,
            tokens_of_source=dict(tokens_of),
        )

    def plus(self, later: "LoadReport") -> "LoadReport":
        """The report on the rows of both."""
        sums: dict[str, Any] = {}
        for item in fields(self):
            one, other = getattr(self, item.name), getattr(later, item.name)
            if isinstance(one, dict):
                sums[item.name] = {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
            elif item.name.startswith("num_"):
                sums[item.name] = one + other
        return replace(self, **sums, malformed=(*self.malformed, *later.malformed)[:DESCRIBED_ROWS])

    @property
    def _mixed(self) -> bool:
        return bool(self.num_unmixed or self.num_repeated)

    @property
    def unused(self) -> dict[str, int]:
        """How many rows were not used, by reason, without reasons that no row had."""
        reasons = {
            "malformed": self.num_malformed,
            "empty": self.num_empty,
            "with media": self.num_media,
            "by data.preprocess": self.num_filtered,
            "too long": self.num_dropped,
            "by weight": self.num_unmixed,
        }
        return {reason: count for reason, count in reasons.items() if count}

    @property
    def first_malformed(self) -> str:
        """File, line and reason of the first malformed row; empty if there is none."""
        return str(self.malformed[0]) if self.malformed else ""

    def __str__(self) -> str:
        """One line; more describe the first malformed row, if there is any, and an entry of the cache that was not used."""
        formats = ", ".join(f"{count} {name}" for name, count in sorted(self.formats.items()))
        if len(self.used_of_source) > 1:
            formats = "; ".join([formats, *(f"{count} of {name}" for name, count in self.used_of_source.items())])
        line = (
            f"{self.num_used} of {self.num_rows} rows used{f' ({formats})' if formats else ''}: {self.num_documents} documents, "
            f"{self.num_tokens} tokens, {self.num_trained} trained; {self.num_malformed} malformed, {self.num_empty} empty, "
            f"{self.num_too_long} too long ({self.num_dropped} dropped)"
            f"{f', {self.num_media} with media' if self.num_media else ''}"
            f"{f', {self.num_filtered} left out by data.preprocess' if self.num_filtered else ''}"
            f"{f'; by weight {self.num_unmixed} left out, {self.num_repeated} repeated' if self._mixed else ''}"
            f"{f'; {self.num_held_out} rows held out' if self.num_held_out else ''}{', from the cache' if self.cached else ''}"
        )
        first = f"first malformed row: {self.first_malformed}" if self.num_malformed else ""
        nowhere = ", ".join(name for name, count in self.rows_of_column.items() if not count)
        unmatched = f"data.columns names {nowhere}, which no row has" if nowhere else ""
        return "\n".join(text for text in (line, first, unmatched, self.notice) if text)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents in flat arrays. The inputs of document i are `tokens[starts[i] : starts[i] + lengths[i]]`. Its labels are the
    same range shifted by one, where `trained`, which is what a token weighs in the loss, is not 0 at the shifted position.
    Neighbouring documents that were cut from one text share a token: the last label of one is the first input of the next.
    """

    tokens: NDArray[np.int32]  # (T,)
    trained: NDArray[np.bool_ | np.float32]  # (T,): booleans if nothing weighs more than 1
    starts: NDArray[np.int64]  # (documents,)
    lengths: NDArray[np.int64]  # (documents,), at least 1
    rows: NDArray[np.int64]  # (documents,): the row that each document came from
    names: tuple[str, ...]  # for each row, its file:line
    sources: NDArray[np.int32]  # (documents,): the source that each document came from
    source_names: tuple[str, ...]
    columns: Mapping[int, Mapping[str, object]] = field(default_factory=dict)  # by row, what a task may read besides
    pairs: bool = False  # whether each row has two documents, one behind the other, which always share a sequence
    reference_logps: NDArray[np.float32] | None = None  # (documents,): log-probabilities of answers by a reference model

    @classmethod
    def from_ids(
        cls, documents: Sequence[tuple[Sequence[int], Sequence[bool]]], names: Sequence[str] | None = None
    ) -> "Documents":
        """Documents made of (ids, trained) pairs with at least 2 ids each. Document i is of row i."""
        lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
        if len(lengths) == 0 or lengths.min() < 2 or any(len(ids) != len(trained) for ids, trained in documents):
            raise DataError("cannot make documents: give at least one, each with 2 or more ids and as many `trained` marks.")
        return cls(
            tokens=np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in documents]),
            trained=np.concatenate([np.asarray(trained, dtype=bool) for _, trained in documents]),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths - 1,
            rows=np.arange(len(lengths)),
            names=tuple(names or (f"document {i}" for i in range(len(lengths)))),
            sources=np.zeros(len(lengths), np.int32),
            source_names=("",),
        )

    def label(self, document: int) -> str:
        """Where a document is from, and the columns of its row."""
        columns = self.columns.get(int(self.rows[document]), {})
        names = ("with its answer", "with the answer to another") if "label" in columns else ("chosen", "rejected")
        side = [names[document % 2]] if self.pairs else []
        return " ".join([self.names[self.rows[document]], *side, *(f"{name}={brief(value)}" for name, value in columns.items())])

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the documents: their ids, labels, bounds, rows and columns."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.trained, self.starts, self.lengths, self.rows):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.columns:
            digest.update(json.dumps(sorted(self.columns.items()), default=str).encode())
        return digest.hexdigest()

    @property
    def tokens_of_source(self) -> NDArray[np.int64]:
        """The positions that the documents of each source take, (sources,)."""
        return np.bincount(self.sources, self.lengths, len(self.source_names)).astype(np.int64)

    def use(self, documents: NDArray[np.int64]) -> dict[str, tuple[int, int]]:
        """By the name of each source, the rows that begin in these documents, and their positions."""
        before = np.maximum(documents - 1, 0)
        begins = (
            (documents == 0) | (self.rows[documents] != self.rows[before]) | (self.sources[documents] != self.sources[before])
        )
        sources, lengths, count = self.sources[documents], self.lengths[documents], len(self.source_names)
        rows, tokens = np.bincount(sources, begins, count), np.bincount(sources, lengths, count)
        found: dict[str, tuple[int, int]] = {}
        for name, num_rows, num_tokens in zip(self.source_names, rows, tokens, strict=True):
            before_rows, before_tokens = found.get(name, (0, 0))  # a source may be named twice
            found[name] = before_rows + int(num_rows), before_tokens + int(num_tokens)
        return found

    @cached_property
    def num_trained(self) -> int:
        """Positions of documents whose next token is trained on."""
        begins = np.sort(self.starts) + 1
        ends = begins + self.lengths[np.argsort(self.starts, kind="stable")]
        marks = np.append(self.trained != 0, False).view(np.uint8)  # one more, because reduceat wants every end inside
        return int(np.add.reduceat(marks, np.stack([begins, ends], 1).reshape(-1), dtype=np.int64)[::2].sum())

    def take(self, documents: NDArray[np.int64]) -> "Documents":
        """These documents in this order, one that occurs twice, twice. The arrays of tokens are shared, not copied."""
        arrays = {name: getattr(self, name)[documents] for name in ("starts", "lengths", "rows", "sources")}
        if self.reference_logps is not None:
            arrays["reference_logps"] = self.reference_logps[documents]
        return replace(self, **arrays)

    @property
    def together(self) -> int:
        """How many neighbouring documents always share a sequence."""
        return 2 if self.pairs else 1

    def select(self, rows: NDArray[np.int64]) -> "Documents":
        """The documents of these rows, in their present order. The arrays of tokens are shared, not copied."""
        return self.take(np.flatnonzero(np.isin(self.rows, rows)))

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError naming every row (at most 8) with an id outside [0, vocab_size)."""
        outside = np.flatnonzero((self.tokens < 0) | (self.tokens >= vocab_size))
        if not len(outside):
            return
        order = np.argsort(self.starts, kind="stable")
        owners = order[np.clip(np.searchsorted(self.starts[order], outside, side="right") - 1, 0, None)]
        first = {int(self.rows[owner]): int(self.tokens[at]) for owner, at in zip(owners[::-1], outside[::-1], strict=True)}
        listed = "; ".join(f"{self.names[row]} has id {token}" for row, token in list(first.items())[::-1][:8])
        raise DataError(
            f"cannot train on these data: {len(outside)} ids are outside the model's vocabulary of {vocab_size}: {listed}. "
            "Use the tokenizer that belongs to the model, or a model with a larger vocabulary."
        )
