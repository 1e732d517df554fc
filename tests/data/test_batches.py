"""Batches by number: contents, order, packing, splitting."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.data import BatchShape, DocumentBatches, Documents
from mpar.data._packing import pack
from mpar.errors import ConfigError, DataError
from tests.tiers import examples


def make_documents(lengths, vocab_size=97, seed=0):
    """Distinct random documents; every third token is not trained, the last always is."""
    rng = np.random.default_rng(seed)
    marks = [[i % 3 != 1 or i == n - 1 for i in range(n)] for n in lengths]
    return [(rng.integers(0, vocab_size, n).tolist(), marked) for n, marked in zip(lengths, marks, strict=True)]


def make_batches(lengths, batch_size=3, seq_len=16, packing=True, pad_to_multiple=1, **options):
    documents = Documents.from_ids(make_documents(lengths))
    shape = BatchShape(batch_size, seq_len, packing, pad_to_multiple)
    return DocumentBatches(documents, shape, vocab_size=97, pad_id=96, **options)


def expected_inputs(lengths):
    """Each document as the (tokens, labels, positions) that training should see, written with lists."""
    return [
        (tuple(ids[:-1]), tuple(i if m else -100 for i, m in zip(ids[1:], marked[1:], strict=True)), tuple(range(len(ids) - 1)))
        for ids, marked in make_documents(lengths)
    ]


def seen_inputs(batches, epoch):
    """The documents of an epoch, cut out of its batches by document number; checks the padding on the way."""
    seen = []
    for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch):
        batch = {name: value.tolist() for name, value in batches.batch(step).items()}
        rows = zip(batch["documents"], batch["tokens"], batch["labels"], batch["positions"], strict=True)
        for numbers, *columns in rows:
            groups = [(n, len(list(group))) for n, group in itertools.groupby(numbers)]
            assert [n for n, _ in groups if n != -1] == list(range(len([n for n, _ in groups if n != -1])))
            multiple = batches.shape.pad_to_multiple
            assert all(n != -1 or length < multiple for n, length in groups[:-1])
            at = 0
            for n, length in groups:
                assert n == -1 or at % multiple == 0
                document = tuple(tuple(column[at : at + length]) for column in columns)
                if n == -1:
                    assert document == ((96,) * length, (-100,) * length, (0,) * length)
                else:
                    seen.append(document)
                at += length
    return seen


lengths_strategy = st.lists(st.integers(2, 17), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths_strategy, st.booleans(), st.booleans(), st.integers(1, 5), st.sampled_from([1, 2, 8]))
def test_each_epoch_feeds_every_document_once_and_whole(lengths, packing, shuffle, batch_size, multiple):
    """Tokens, shifted labels and positions of all documents come back, in two epochs, and nothing else but padding, which is
    behind the last document, and before others as far as they must begin at a multiple."""
    batches = make_batches(lengths, batch_size=batch_size, packing=packing, shuffle=shuffle, pad_to_multiple=multiple)
    for epoch in (0, 1):
        assert Counter(seen_inputs(batches, epoch)) == Counter(expected_inputs(lengths))


@settings(deadline=None)
@given(lengths_strategy, st.integers(1, 6), st.integers(0, 5))
def test_readers_of_any_number_see_the_same_batch(lengths, batch_size, step):
    """Rows read one by one, by a stride or in halves are those of the whole batch."""
    whole = make_batches(lengths, batch_size=batch_size).batch(step)
    parts = [make_batches(lengths, batch_size=batch_size).rows(step, [i]) for i in range(batch_size)]
    halves = [make_batches(lengths, batch_size=batch_size).rows(step, range(i, batch_size, 2)) for i in range(2)]
    backwards = make_batches(lengths, batch_size=batch_size).rows(step, range(batch_size)[::-1])
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
        assert torch.equal(halves[0][name], value[0::2]) and torch.equal(halves[1][name], value[1::2])
        assert torch.equal(backwards[name], value.flip(0))


class Recorded(np.ndarray):
    """Tokens that note which of them are read."""

    def __getitem__(self, key):
        self.reads.append(key)
        return super().__getitem__(key)


def test_reading_rows_reads_their_documents_alone():
    """Each position of two of six rows is read once as a token and once as a label, and no token of another document."""
    documents = Documents.from_ids(make_documents([9] * 24))
    tokens = documents.tokens.view(Recorded)
    tokens.reads = []
    batches = DocumentBatches(replace(documents, tokens=tokens), BatchShape(6, 16), vocab_size=97, shuffle=True)
    shuffled = DocumentBatches(documents, BatchShape(6, 16), vocab_size=97, shuffle=True)
    tokens.reads.clear()
    rows = batches.rows(1, [4, 1])
    assert sorted(read.stop - read.start for read in tokens.reads) == [8] * 8  # two documents a row, tokens and labels
    expected = shuffled.batch(1)
    assert all(torch.equal(value, expected[name][[4, 1]]) for name, value in rows.items())


@pytest.mark.parametrize("rows", [[3], [0, -1], [7, 0]])
def test_rows_that_are_not_there(rows):
    """They are named, with the number of rows."""
    with pytest.raises(ConfigError, match="it has 3 rows"):
        make_batches([9] * 8).rows(0, rows)


def test_shapes_and_dtypes():
    """Everything is int64 of (batch_size, seq_len), contract of the training step."""
    batch = make_batches([5, 6, 7], batch_size=4, seq_len=8).batch(0)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        name: (torch.int64, (4, 8)) for name in ("tokens", "labels", "positions", "documents")
    }


def test_random_access_and_resuming_equal_reading_in_order():
    """A fresh object asked for steps in any order, over several epochs, gives what one pass gave."""
    lengths = np.random.default_rng(1).integers(2, 18, 50).tolist()
    first = make_batches(lengths, seed=4)
    steps = range(4 * first.steps_per_epoch)
    in_order = [first.batch(step) for step in steps]
    other = make_batches(lengths, seed=4)
    for step in np.random.default_rng(2).permutation(len(steps)).tolist():
        assert all(torch.equal(value, in_order[step][name]) for name, value in other.batch(step).items())


def test_order_differs_between_epochs_and_seeds():
    """Shuffling depends on both; without it every epoch is the same."""

    def order(seed, epoch, shuffle=True):
        batches = make_batches([9] * 40, seed=seed, shuffle=shuffle, packing=False)
        return [
            t
            for i in range(batches.steps_per_epoch)
            for t in batches.batch(epoch * batches.steps_per_epoch + i)["tokens"].tolist()
        ]

    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0) and order(0, 1) != order(1, 0)
    assert order(0, 0, shuffle=False) == order(0, 1, shuffle=False) == order(5, 0, shuffle=False)


def test_order_is_that_of_the_first_release():
    """The order of a run must not change under a user who resumes it: a change here is a break."""
    batches = make_batches([9] * 8, batch_size=8, packing=False)
    plain = make_batches([9] * 8, batch_size=8, packing=False, shuffle=False).batch(0)["tokens"].tolist()
    assert [plain.index(row) for row in batches.batch(0)["tokens"].tolist()] == [5, 4, 0, 7, 6, 2, 3, 1]


def test_equal_documents_change_places_between_epochs():
    """Which documents share a sequence is not the same each epoch."""
    batches = make_batches([9] * 40, seq_len=16)

    def pairs(epoch):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        rows = [row.reshape(2, 8).tolist() for step in steps for row in batches.batch(step)["tokens"]]
        return {frozenset(map(tuple, row)) for row in rows if row[0] != row[1]}

    assert len(pairs(0)) == 20
    assert len(pairs(0) & pairs(1)) < 8


DRAWS = {
    "log-normal": lambda draw: draw.lognormal(5, 1, 4000),
    "exponential": lambda draw: draw.exponential(300, 4000),
    "two sorts": lambda draw: np.where(draw.random(4000) < 0.8, draw.normal(90, 30, 4000), draw.normal(900, 200, 4000)),
}


@pytest.mark.parametrize("seq_len", [1024, 2048])
@pytest.mark.parametrize("name", DRAWS)
def test_packing_fills_sequences(name, seq_len):
    """At least 98 % of the positions hold a document, packed together or in windows of a thousand."""
    lengths = np.clip(DRAWS[name](np.random.default_rng(0)).astype(int), 2, seq_len)
    batches = make_batches(lengths.tolist(), seq_len=seq_len)
    assert batches.fill_ratio == pytest.approx((lengths - 1).sum() / (batches.num_sequences * seq_len))
    windows = [pack(lengths[i : i + 1000], seq_len) for i in range(0, len(lengths), 1000)]
    assert min(batches.fill_ratio, lengths.sum() / sum(map(len, windows)) / seq_len) >= 0.98


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.integers(1, 50), max_size=60))
def test_bins_hold_every_item_once_and_do_not_overflow(lengths):
    """No bin exceeds the capacity, and no two bins could have been one."""
    bins = pack(np.array(lengths, dtype=np.int64), 50)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    sums = sorted(sum(lengths[item] for item in members) for members in bins)
    assert all(total <= 50 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 50


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_bins_depend_on_the_multiset_of_lengths_only(lengths, random):
    """So every epoch has the same number of sequences, whatever its order."""

    def shapes(values):
        return [[values[item] for item in members] for members in pack(np.array(values, dtype=np.int64), 50)]

    shuffled = random.sample(lengths, len(lengths))
    assert shapes(shuffled) == shapes(lengths)


def test_packing_many_documents_is_fast_enough():
    """A hundred thousand documents pack within the size bound of 11/9 of the optimum."""
    lengths = np.random.default_rng(0).integers(1, 1000, 100_000)
    assert len(pack(lengths, 1000)) <= 11 / 9 * lengths.sum() / 1000 + 4


def test_split_is_disjoint_complete_and_independent_of_the_seed():
    """Both sides together are the data; the choice follows from the data alone; validation is not shuffled."""
    lengths = np.random.default_rng(3).integers(2, 18, 60).tolist()
    train, validation = make_batches(lengths, seed=1).split(0.2)
    assert len(validation.documents) == train.report.num_held_out == validation.report.num_held_out == 12
    assert "12 rows held out" in str(train.report) and "held out" not in str(make_batches(lengths).report)
    assert Counter(seen_inputs(train, 0) + seen_inputs(validation, 0)) == Counter(expected_inputs(lengths))
    assert Counter(seen_inputs(make_batches(lengths, seed=2).split(0.2)[1], 0)) == Counter(seen_inputs(validation, 0))
    assert torch.equal(validation.batch(0)["tokens"], validation.batch(validation.steps_per_epoch)["tokens"])


def test_split_leaves_something_on_both_sides():
    """Two rows are enough, one is not."""
    train, validation = make_batches([5, 6]).split(0.01)
    assert (len(train.documents), len(validation.documents)) == (1, 1)
    with pytest.raises(DataError, match="it takes two"):
        make_batches([5]).split(0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_split_refuses_fractions(fraction):
    """Nothing, everything or more cannot be split off."""
    with pytest.raises(ConfigError, match="fraction"):
        make_batches([5, 6]).split(fraction)


def test_ids_outside_the_vocabulary_are_named():
    """Row, id and vocabulary size, for tokens and labels, before any batch is made."""
    documents = Documents.from_ids(
        [([1, 2], [True, True]), ([3, 99, 4], [False] * 3), ([5, 97], [True] * 2)], ["a:1", "a:2", "b:7"]
    )
    with pytest.raises(DataError, match=r"2 ids .* vocabulary of 97: a:2 has id 99; b:7 has id 97"):
        DocumentBatches(documents, BatchShape(1, 8), vocab_size=97)
    negative = Documents.from_ids([([1, -1], [True, True])])
    with pytest.raises(DataError, match="document 0 has id -1"):
        DocumentBatches(negative, BatchShape(1, 8), vocab_size=97)


def test_documents_that_do_not_fit_are_refused():
    """17 tokens take 16 positions; 18 take one too many."""
    assert make_batches([17]).num_sequences == 1
    with pytest.raises(DataError, match=r"document 1, takes 17\. Raise seq_len"):
        make_batches([17, 18])


def test_impossible_settings_are_refused_together():
    """Sizes, seed and padding id are checked at once."""
    with pytest.raises(ConfigError, match="batch_size=0, seq_len=-1, seed=-2, pad_id=97"):
        DocumentBatches(Documents.from_ids(make_documents([4])), BatchShape(0, -1), vocab_size=97, pad_id=97, seed=-2)


def test_negative_step_is_refused():
    """Steps count from zero."""
    with pytest.raises(ConfigError, match="step -1"):
        make_batches([4]).batch(-1)


def test_fingerprint_covers_what_decides_the_order():
    """Equal data and settings agree; any change of them shows."""
    base = make_batches([5, 6, 7]).fingerprint
    assert make_batches([5, 6, 7]).fingerprint == base
    others = [
        make_batches([5, 6, 8]), make_batches([5, 6, 7], seed=1), make_batches([5, 6, 7], shuffle=False),
        make_batches([5, 6, 7], packing=False), make_batches([5, 6, 7], batch_size=4), make_batches([5, 6, 7], seq_len=17),
        make_batches([5, 6, 7], pad_to_multiple=8),
    ]  # fmt: skip
    assert len({base, *(other.fingerprint for other in others)}) == 8


def test_fingerprint_is_that_of_earlier_versions():
    """A checkpoint of a run before documents could begin at multiples goes on."""
    documents = Documents.from_ids([([1, 2, 3], [True] * 3), ([4, 5], [False, True])])
    before = "98bb79f79eed05895ef1058e6b02b3adf67515c96944fbed1b02880bca3ffa41"
    assert DocumentBatches(documents, BatchShape(2, 8), vocab_size=9).fingerprint == before


@pytest.mark.parametrize("documents", [[], [([1], [True])], [([1, 2], [True])]], ids=str)
def test_malformed_documents_are_refused(documents):
    """None, one too short, one with too few marks."""
    with pytest.raises(DataError, match="cannot make documents"):
        Documents.from_ids(documents)
