"""The documents that have been read so far."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpar.data._documents import Documents
from mpar.data._tokenise import RowTokens
from mpar.data.rows import Row

__all__ = ["Kept"]


class Kept:
    """Documents as lists; `documents` makes flat arrays of them. source_names: those of the sources that rows name by number."""

    def __init__(self, source_names: Sequence[str]) -> None:
        self.source_names = tuple(source_names)
        self.num_tokens = 0
        self._tokens: list[NDArray[np.int32]] = []
        self._trained: list[NDArray[np.bool_ | np.float32]] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._rows: list[int] = []
        self._sources: list[int] = []
        self._names: dict[str, int] = {}
        self._columns: dict[int, Mapping[str, object]] = {}
        self._pairs = False

    def add(self, source: int, row: Row, made: RowTokens) -> None:
        """Add the documents of a row."""
        base = self.num_tokens
        self._tokens.append(made.ids)
        self._trained.append(made.trained)
        self.num_tokens += len(made.ids)
        number = self._names.setdefault(row.where, len(self._names))
        self._pairs |= bool(row.rejected)
        if row.columns:
            self._columns[number] = row.columns
        for start, end in made.documents:
            self._starts.append(base + start)
            self._lengths.append(end - start - 1)
            self._rows.append(number)
            self._sources.append(source)

    def documents(self) -> Documents:
        """All documents that were added."""
        return Documents(
            tokens=np.concatenate([np.zeros(0, np.int32), *self._tokens]),
            trained=np.concatenate([np.zeros(0, np.bool_), *self._trained]),
            starts=np.array(self._starts, dtype=np.int64),
            lengths=np.array(self._lengths, dtype=np.int64),
            rows=np.array(self._rows, dtype=np.int64),
            names=tuple(self._names),
            sources=np.array(self._sources, dtype=np.int32),
            source_names=self.source_names,
            columns=self._columns,
            pairs=self._pairs,
        )
