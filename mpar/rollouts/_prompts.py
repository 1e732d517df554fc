"""Prompts in an order that depends on the seed alone, so that a run that goes on is given the same ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpar.data import DocumentBatches, Documents, random_order
from mpar.errors import DataError

__all__ = ["Prompt", "Prompts"]


@dataclass(frozen=True)
class Prompt:
    """A question: its text and tokens, the file and line of its row, the other columns of the row, and the tokens of the answer
    that the data have; empty if they have none."""

    text: str
    ids: tuple[int, ...]
    name: str
    columns: Mapping[str, object]
    answer_ids: tuple[int, ...] = ()


class Prompts:
    """The prompts among `documents`, over and over; with `shuffle` in a new order each time.

    Of a document with answers, the last one is the answer, and all before it the prompt. max_tokens: the most tokens of a prompt.
    Raises DataError if all of them are longer.
    """

    def __init__(self, documents: Documents, *, seed: int, shuffle: bool, max_tokens: int | None = None) -> None:
        self._documents, self._seed, self._shuffle = documents, seed, shuffle
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])
        ends = [self._prompt_end(index) for index in range(len(documents))]
        self._usable = [index for index, end in enumerate(ends) if 2 <= end <= (max_tokens or end)]
        if not self._usable:
            raise DataError(
                f"cannot draw answers: none of the {len(ends)} prompts has between 2 and max_prompt_tokens={max_tokens} tokens; "
                f"the shortest has {min(ends)}."
            )

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._usable)

    def usable_of(self, batches: DocumentBatches) -> DocumentBatches:
        """`batches`, whose documents these prompts are among, without documents that are no usable prompt. Their rows are counted
        as too long and left out."""
        usable = np.array(self._usable)
        if len(usable) == len(batches.documents):
            return batches
        kept = batches.documents.take(usable)
        count = len(np.setdiff1d(batches.documents.rows, kept.rows))
        report, signs = batches.report, {"num_used": -1, "num_too_long": 1, "num_dropped": 1}
        changed = replace(report, **{name: getattr(report, name) + sign * count for name, sign in signs.items()})
        return batches.only(usable, changed.of(kept))

    def take(self, number: int, attempt: int = 0) -> Prompt:
        """The prompt number `number` of a run, which has no end. The prompts of other attempts come in other orders."""
        epoch, place = divmod(number, len(self))
        if self._order[0] != (epoch, attempt):
            shuffled = self._shuffle or attempt > 0
            order = random_order(len(self), self._seed, epoch, attempt) if shuffled else list(range(len(self)))
            self._order = (epoch, attempt), order
        index, documents = self._usable[self._order[1][place]], self._documents
        row, start = int(documents.rows[index]), int(documents.starts[index])
        ids = documents.tokens[start : start + int(documents.lengths[index]) + 1].tolist()
        columns, end = dict(documents.columns.get(row, {})), self._prompt_end(index)
        last = int(np.flatnonzero(self._trained(index))[-1]) + 1 if end < len(ids) else end
        return Prompt(str(columns.pop("prompt", "")), tuple(ids[:end]), documents.names[row], columns, tuple(ids[end:last]))

    def _trained(self, index: int) -> NDArray[np.bool_]:
        """Which tokens of a document are of an answer."""
        start = int(self._documents.starts[index])
        return self._documents.trained[start : start + int(self._documents.lengths[index]) + 1] != 0

    def _prompt_end(self, index: int) -> int:
        """How many tokens a document has before its last answer."""
        places = np.flatnonzero(self._trained(index))
        if not len(places):
            return int(self._documents.lengths[index]) + 1
        gaps = np.flatnonzero(np.diff(places) > 1)
        return int(places[gaps[-1] + 1] if len(gaps) else places[0])
