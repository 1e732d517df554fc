"""The documents that have been read so far."""

import numpy as np
from numpy.typing import NDArray

from mpar.data._documents import Documents
from mpar.data.rows import Row

__all__ = ["Kept"]


class Kept:
    """Documents as lists; `documents` makes flat arrays of them."""

    def __init__(self) -> None:
        self.tokens: list[NDArray[np.int32]] = []
        self.trained: list[NDArray[np.bool_ | np.float32]] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.rows: list[int] = []
        self.names: dict[str, int] = {}
        self.num_tokens = 0

    def append(self, row: Row, ids: NDArray[np.int32], trained: NDArray[np.bool_ | np.float32]) -> int:
        """Add the tokens of a row; returns the index of the first."""
        base = self.num_tokens
        self.tokens.append(ids)
        self.trained.append(trained)
        self.num_tokens += len(ids)
        self.names.setdefault(row.where, len(self.names))
        return base

    def add_document(self, row: Row, start: int, length: int) -> None:
        """Add a document of a row whose tokens have been added."""
        self.starts.append(start)
        self.lengths.append(length)
        self.rows.append(self.names[row.where])

    def documents(self) -> Documents:
        """All documents that were added, at least one."""
        return Documents(
            tokens=np.concatenate(self.tokens),
            trained=np.concatenate(self.trained),
            starts=np.array(self.starts, dtype=np.int64),
            lengths=np.array(self.lengths, dtype=np.int64),
            rows=np.array(self.rows, dtype=np.int64),
            names=tuple(self.names),
        )
