"""Prompts in an order that depends on the seed alone, so that a run that goes on is given the same ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from mpar.data import Documents, random_order

__all__ = ["Prompt", "Prompts"]


@dataclass(frozen=True)
class Prompt:
    """A question: its text and tokens, the file and line of its row, and the other columns of the row."""

    text: str
    ids: tuple[int, ...]
    name: str
    columns: Mapping[str, object]


class Prompts:
    """The prompts among `documents`, over and over; with `shuffle` in a new order each time."""

    def __init__(self, documents: Documents, *, seed: int, shuffle: bool) -> None:
        self._documents, self._seed, self._shuffle = documents, seed, shuffle
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._documents)

    def take(self, number: int, attempt: int = 0) -> Prompt:
        """The prompt number `number` of a run, which has no end. The prompts of other attempts come in other orders."""
        epoch, place = divmod(number, len(self))
        if self._order[0] != (epoch, attempt):
            shuffled = self._shuffle or attempt > 0
            order = random_order(len(self), self._seed, epoch, attempt) if shuffled else list(range(len(self)))
            self._order = (epoch, attempt), order
        index, documents = self._order[1][place], self._documents
        row, start = int(documents.rows[index]), int(documents.starts[index])
        ids = documents.tokens[start : start + int(documents.lengths[index]) + 1].tolist()
        columns = dict(documents.columns.get(row, {}))
        return Prompt(str(columns.pop("prompt", "")), tuple(ids), documents.names[row], columns)
