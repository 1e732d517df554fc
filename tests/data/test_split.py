"""The split of few rows into training and validation: how many each side gets, and that no row is on both or on none."""

import dataclasses

import numpy as np
import pytest

from mpar.data import BatchShape, DocumentBatches, Documents
from mpar.errors import ConfigError, DataError

SMALL, LARGE = 1e-9, 1 - 1e-9


def batches_of(num_rows, chunks=1):
    """`num_rows` rows of `chunks` documents each; the first token of a document is the number of its row."""
    documents = Documents.from_ids([([row, 50, 51], [True] * 3) for row in range(num_rows) for _ in range(chunks)])
    names = tuple(f"file:{row}" for row in range(num_rows))
    documents = dataclasses.replace(documents, rows=np.arange(num_rows).repeat(chunks), names=names)
    return DocumentBatches(documents, BatchShape(2, 4), vocab_size=97)


def rows_of(batches):
    """The numbers of the rows on one side, with one entry for each document."""
    return sorted(int(batches.documents.tokens[start]) for start in batches.documents.starts)


@pytest.mark.parametrize(
    ("num_rows", "fraction", "num_held_out"),
    [
        *((2, fraction, 1) for fraction in (SMALL, 0.1, 0.5, 0.9, LARGE)),
        *((3, fraction, 1) for fraction in (SMALL, 0.1, 1 / 3, 0.49)),
        *((3, fraction, 2) for fraction in (0.51, 2 / 3, 0.9, LARGE)),
        (10, 0.14, 1),
        (10, 0.16, 2),
        (10, 0.94, 9),
        (10, LARGE, 9),
    ],
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_both_sides_of_few_rows(num_rows, fraction, num_held_out, chunks):
    """The nearest number of whole rows is held out, but at least one, and one is left to train on; each row is on one side."""
    training, held_out = map(rows_of, batches_of(num_rows, chunks).split(fraction))
    assert len(set(held_out)) == num_held_out
    assert len(set(training)) == num_rows - num_held_out
    assert sorted(training + held_out) == sorted(list(range(num_rows)) * chunks)
    assert not set(training) & set(held_out)


@pytest.mark.parametrize("fraction", [SMALL, 0.5, LARGE])
@pytest.mark.parametrize("chunks", [1, 3])
def test_one_row_cannot_be_split(fraction, chunks):
    """A row is never cut in two, not even one of several documents."""
    with pytest.raises(DataError, match="cannot split 1 row of data into training and validation: it takes two"):
        batches_of(1, chunks).split(fraction)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.0, 1.0, -SMALL, 1 + SMALL, float("inf"), float("nan")])
def test_a_fraction_is_more_than_nothing_and_less_than_everything(num_rows, fraction):
    """The bounds themselves are refused, whatever the number of rows; the message has the number that was given."""
    with pytest.raises(ConfigError, match=f"cannot split off {fraction} of the data"):
        batches_of(num_rows).split(fraction)
