"""Prompts in an order that depends on the seed alone, so that a run that goes on is given the same ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mpar.data import MESSAGES, BadRow, DocumentBatches, Documents, Message, random_order
from mpar.errors import DataError

__all__ = ["Prompt", "Prompts"]

_MOST_DESCRIBED = 10_000  # as of other malformed rows


@dataclass(frozen=True)
class Prompt:
    """A question: its text and tokens, the file and line of its row, the other columns of the row, the tokens of the answer that
    the data have, and the messages up to the question; empty if they have none."""

    text: str
    ids: tuple[int, ...]
    name: str
    columns: Mapping[str, object]
    answer_ids: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


class Prompts:
    """The prompts among `documents`, over and over; with `shuffle` in a new order each time.

    Of a document with answers, the last one is the answer, and all before it the prompt. max_tokens: the most tokens of a prompt.
    answered: documents without an answer are left out. Raises DataError if no document is usable.
    """

    def __init__(
        self, documents: Documents, *, seed: int, shuffle: bool, max_tokens: int | None = None, answered: bool = False
    ) -> None:
        self._documents, self._seed, self._shuffle = documents, seed, shuffle
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])
        ends = [self._prompt_end(index) for index in range(len(documents))]
        self._unanswered = [index for index, end in enumerate(ends) if answered and end > documents.lengths[index]]
        no_answer = set(self._unanswered)
        self._usable = [i for i, end in enumerate(ends) if 2 <= end <= (max_tokens or end) and i not in no_answer]
        if not self._usable:
            without = f", and {len(no_answer)} have no answer to learn from" if no_answer else ""
            raise DataError(
                f"cannot draw answers: none of the {len(ends)} prompts has between 2 and max_prompt_tokens={max_tokens} tokens; "
                f"the shortest has {min(ends)}{without}."
            )

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._usable)

    def usable_of(self, batches: DocumentBatches) -> DocumentBatches:
        """`batches`, whose documents these prompts are among, without documents that are no usable prompt. Their rows are counted
        as malformed if they have no answer, else as too long and left out."""
        usable, documents = np.array(self._usable), batches.documents
        if len(usable) == len(documents):
            return batches
        kept = documents.take(usable)
        faulty = np.setdiff1d(documents.rows[self._unanswered], kept.rows).tolist()
        num_too_long = len(np.setdiff1d(documents.rows, kept.rows)) - len(faulty)
        bad = tuple(BadRow(documents.names[row], 0, "no answer, and the policy writes only some") for row in faulty)
        report = batches.report
        changed = replace(
            report,
            num_used=report.num_used - num_too_long - len(faulty),
            num_too_long=report.num_too_long + num_too_long,
            num_dropped=report.num_dropped + num_too_long,
            num_malformed=report.num_malformed + len(faulty),
            malformed=(*report.malformed, *bad)[:_MOST_DESCRIBED],
        )
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
        text = str(columns.pop("prompt", ""))
        messages = columns.pop(MESSAGES, [{"role": "user", "content": text}])
        name, answer_ids = documents.names[row], tuple(ids[end:last])
        return Prompt(text, tuple(ids[:end]), name, columns, answer_ids, tuple(cast(list[Message], messages)))

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
