"""Answers: what a batch says of the documents of a row, for tasks that compare them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mpar.data._documents import Documents
from mpar.errors import DataError, brief

__all__ = ["Answers", "check_columns", "with_mismatched"]

_FILLS = {"answers": -1, "indices": -1, "ends": -1, "signs": -1, "step_labels": -1}
_FROM_ROWS = ("beta", "margin")
MISMATCHED = 2


@dataclass(frozen=True)
class Answers:
    """The entries that batches have besides those of fine-tuning.

    count:      how many answers a row may hold, which is the length of all columns.
    keys:       which entries there are. (B, S): `answers`, `indices`, `ends`, `step_labels`. (B, count): `signs`, `beta`,
                `margin`, `reference_logps`. See `mpar.tasks.Task`.
    prompts:    labels are given at all positions, not only where they count for an answer.
    scored:     documents have a position for their last token, too, at which it is scored.
    mismatched: behind each document there is one with the same question and the answer to another one, of sign 2.
    """

    count: int
    keys: tuple[str, ...]
    prompts: bool = False
    scored: bool = False
    mismatched: bool = False

    def arrays(self, num_rows: int, seq_len: int) -> dict[str, NDArray[np.generic]]:
        """The entries of rows without answers."""
        found: dict[str, NDArray[np.generic]] = {}
        for key in self.keys:
            length = seq_len if key in ("answers", "indices", "ends", "step_labels") else self.count
            dtype = np.int64 if key in _FILLS else np.float32
            found[key] = np.full((num_rows, length), _FILLS.get(key, 0), dtype=dtype)
        return found

    def write(
        self, documents: Documents, document: int, number: int, place: slice, arrays: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Write what is to be said of a document, the one with this number in its row, at these positions."""
        start = int(documents.starts[document]) + 1
        shifted = slice(start, start + int(documents.lengths[document]))
        trained = documents.trained[shifted] != 0
        columns = documents.columns.get(int(documents.rows[document]), {})
        if "answers" in arrays:
            arrays["answers"][place] = np.where(trained, number, -1)
        if "indices" in arrays:
            arrays["indices"][place] = np.where(trained, np.cumsum(trained) - 1, -1)
        if "ends" in arrays:
            arrays["ends"][place.stop - 1] = number
        if "step_labels" in arrays:
            places = np.flatnonzero(documents.trained[start - 1 : shifted.stop - 1])
            labels = np.array(columns["labels"], dtype=np.int64)  # a document that was cut at its end has fewer steps
            arrays["step_labels"][place.start + places] = labels[: len(places)]
        if "signs" in arrays:
            arrays["signs"][number] = self._sign(document, columns)
        if "reference_logps" in arrays and documents.reference_logps is not None:
            arrays["reference_logps"][number] = documents.reference_logps[document]
        for key in _FROM_ROWS:
            if key in arrays:
                arrays[key][number] = cast(float, columns[key])
        if self.prompts:
            arrays["labels"][place] = documents.tokens[shifted]

    def _sign(self, document: int, columns: Mapping[str, object]) -> int:
        if not self.mismatched:
            return 1 - document % 2
        return MISMATCHED if document % 2 else int(bool(columns["label"]))


def check_columns(documents: Documents, answers: Answers) -> None:
    """Raise DataError, listing rows, if a row lacks a number that the task reads from it."""
    problems = []
    for key in (key for key in _FROM_ROWS if key in answers.keys):
        for row in np.unique(documents.rows).tolist():
            value = documents.columns.get(row, {}).get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                problems.append(f"{documents.names[row]}: {key} is {'missing' if value is None else brief(value)}, not a number")
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise DataError(
            "cannot learn from these rows, of which each must have what task.beta=data or task.margin=data reads:\n  "
            + "\n  ".join(problems[:8])
            + more
        )


def with_mismatched(documents: Documents, seq_len: int, pad_to_multiple: int = 1) -> Documents:
    """Behind each document one that has its question and the answer of the document before it, the first that of the last.

    Both together fit into `seq_len` positions: of a question that is too long for that, the beginning is left out. The question
    is what stands before the first token that is trained on.
    """
    pieces: list[NDArray[np.int32]] = []
    marks: list[NDArray[np.bool_ | np.float32]] = []
    lengths: list[int] = []
    bounds = [slice(start, start + length + 1) for start, length in zip(documents.starts, documents.lengths, strict=True)]
    firsts = [int(np.flatnonzero(documents.trained[bound])[0]) for bound in bounds]
    for number, bound in enumerate(bounds):
        other = bounds[number - 1]
        answer = slice(other.start + firsts[number - 1], other.stop)
        room = seq_len + 1 - -(-int(documents.lengths[number]) // pad_to_multiple) * pad_to_multiple
        asked = documents.tokens[bound][: firsts[number]][-max(1, room - (answer.stop - answer.start)) :]
        ids = np.concatenate([asked, documents.tokens[answer]])[:room]
        trained = np.concatenate([np.zeros(len(asked), documents.trained.dtype), documents.trained[answer]])[:room]
        pieces += [documents.tokens[bound], ids]
        marks += [documents.trained[bound], trained]
        lengths += [bound.stop - bound.start - 1, len(ids) - 1]
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(sizes + 1) - (sizes + 1)
    return replace(
        documents,
        tokens=np.concatenate(pieces),
        trained=np.concatenate(marks),
        starts=starts,
        lengths=sizes,
        rows=documents.rows.repeat(2),
        sources=documents.sources.repeat(2),
        pairs=True,
    )
