"""Streams: the same rows in the same order from any cursor, for any number of readers and workers; nothing is lost."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.data import DataConfig, MalformedFile, load_dataset, stream_report
from mpar.data._cursor import Cursor
from mpar.errors import ConfigError, DataError
from tests.tiers import examples

STEPS = 24
BATCH_SIZE = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three sources of 60, 40 and 7 rows of distinct texts, that are conversations, too; some rows are damaged or too long."""
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    for source, count in (("a", 60), ("b", 40), ("c", 7)):
        files = [folder / f"{source}{part}.jsonl" for part in range(2)]
        texts = [[], []]
        for number in range(count):
            name = f"{source}{number} "
            row = {"text": name * int(random.integers(1, 9)), "query": name, "response": name * int(random.integers(1, 9))}
            texts[number % 2].append(json.dumps(row))
            if number % 9 == 4:
                texts[number % 2] += ["{damaged", "", json.dumps({"text": "", "query": 1})]
            if number % 13 == 5:
                texts[number % 2].append(json.dumps({"text": name * 40, "query": name * 40, "response": name}))
        for file, lines in zip(files, texts, strict=True):
            file.write_text("\n".join(lines) + "\n")
    (folder / "unlike.jsonl").write_text('{"text": 1}\n' * 20)
    return folder


def config(folder, *names, **options):
    sources = tuple(str(folder / name) for name in names or ("a*.jsonl", "b*.jsonl", "c*.jsonl"))
    chosen = {"kind": "pt", "sources": sources, "batch_size": BATCH_SIZE, "seq_len": 48, "stream": True}
    return DataConfig(**{**chosen, "shuffle_rows": 20, "workers": 0, **options})


KINDS = {
    "packed": {},
    "not packed": {"packing": False},
    "in order": {"shuffle": False},
    "blended": {"weights": (0.5, 0.3, 0.2)},
    "one source twice": {"weights": (1.0, 1.0)},
    "large blocks": {"shuffle_rows": 90, "weights": (5.0, 1.0, 1.0)},
    "single rows": {"shuffle_rows": 1},
    "conversations": {"kind": "sft", "seq_len": 160, "truncation": "split"},
    "conversations dropped": {"kind": "sft", "seq_len": 120, "weights": (0.2, 0.2, 0.6)},
    "first rows": {"weights": (0.5, 0.5)},
    "cached": {"stream": False, "cache_dir": "cache"},
    "in memory": {"stream": False, "weights": (0.5, 0.3, 0.2)},
}


def kind_of(folder, name):
    names = {"one source twice": ("a*.jsonl", "a*.jsonl"), "first rows": ("a*.jsonl#5", "b*.jsonl")}.get(name, ())
    options = dict(KINDS[name])
    if "cache_dir" in options:
        options["cache_dir"] = str(folder / "cache")
    return config(folder, *names, **options)


@pytest.fixture(scope="module")
def undisturbed(folder, byte_tokenizer):
    """The batches of a run that is not disturbed, by kind of data, and the cursor of each step."""
    found = {}
    for name in KINDS:
        batches = load_dataset(kind_of(folder, name), byte_tokenizer)
        steps, cursors = [], [json.dumps(batches.cursor(0))]
        for step in range(STEPS):
            steps.append(batches.batch(step))
            cursors.append(json.dumps(batches.cursor(step + 1)))
        found[name] = steps, cursors
    return found


@settings(deadline=None, max_examples=examples(200))
@given(
    name=st.sampled_from(sorted(KINDS)), stop=st.integers(0, STEPS - 1), readers=st.sampled_from([1, 2, 3, 4, 6, 12]),
    length=st.integers(1, 4),
)  # fmt: skip
def test_stop_anywhere_and_go_on(folder, byte_tokenizer, undisturbed, name, stop, readers, length):
    """From the cursor of any step, ranks of any number read the rows that the undisturbed run read."""
    steps, cursors = undisturbed[name]
    for reader in range(readers):
        batches = load_dataset(kind_of(folder, name), byte_tokenizer)
        batches.go_to(json.loads(cursors[stop]))
        rows = range(reader, BATCH_SIZE, readers)
        for step in range(stop, min(stop + length, STEPS)):
            found = batches.rows(step, rows)
            assert all(torch.equal(value, steps[step][key][list(rows)]) for key, value in found.items())


def test_without_a_cursor_the_same_batches_come(folder, byte_tokenizer, undisturbed):
    """A batch depends on its step alone: steps in any order, and a cursor that a later step wrote."""
    steps, cursors = undisturbed["blended"]
    batches = load_dataset(kind_of(folder, "blended"), byte_tokenizer)
    for step in (20, 3, 21, 0, 11):
        assert torch.equal(batches.batch(step)["tokens"], steps[step]["tokens"])
    batches.go_to(json.loads(cursors[18]))
    for step in (2, 19, 5):
        assert torch.equal(batches.batch(step)["tokens"], steps[step]["tokens"])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_beside_give_the_same_rows(folder, byte_tokenizer, undisturbed, tmp_path, workers):
    """A process with workers of its own, shared by two ranks that go on from the middle; blocks behind them are deleted."""
    steps, cursors = undisturbed["conversations"]
    wanted = replace(kind_of(folder, "conversations"), workers=workers, cache_dir=str(tmp_path))
    ranks = [load_dataset(wanted, byte_tokenizer) for _ in range(2)]
    for batches in ranks:
        batches.go_to(json.loads(cursors[5]))
    for step in range(5, STEPS):
        for rank, batches in enumerate(ranks):
            rows = range(rank, BATCH_SIZE, 2)
            assert torch.equal(batches.rows(step, rows)["labels"], steps[step]["labels"][list(rows)])
    (shared,) = tmp_path.iterdir()
    assert 1 <= len(list(shared.glob("0*"))) < 8
    for batches in ranks:
        batches.close()
    assert not list(shared.glob("want-*"))


def documents_of(batch):
    """The documents in a batch, as (tokens, labels)."""
    for numbers, tokens, labels in zip(*(batch[key].tolist() for key in ("documents", "tokens", "labels")), strict=True):
        for number in range(max(numbers) + 1):
            places = [place for place, found in enumerate(numbers) if found == number]
            yield tuple(tokens[place] for place in places), tuple(labels[place] for place in places)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_row_once(folder, byte_tokenizer, shuffle):
    """Read in blocks that end where an epoch does, a stream has the documents that data in memory have, in each epoch."""
    whole = load_dataset(config(folder, stream=False), byte_tokenizer)
    expected = Counter(document for step in range(whole.steps_per_epoch) for document in documents_of(whole.batch(step)))
    rows_an_epoch = whole.report.num_used
    batches = load_dataset(config(folder, batch_size=1, shuffle=shuffle, shuffle_rows=rows_an_epoch // 4), byte_tokenizer)
    assert rows_an_epoch % 4 == 0
    epochs, step = [], 0
    for epoch in range(2):
        seen = Counter()
        while Cursor.from_json(batches.cursor(step)).block < 4 * (epoch + 1):
            seen.update(documents_of(batches.batch(step)))
            step += 1
        epochs.append(seen)
    assert epochs == [expected, expected]


def test_shares_are_met_all_along(folder, byte_tokenizer):
    """After any number of blocks, each source has its share of rows, give or take one; small sources are repeated."""
    batches = load_dataset(kind_of(folder, "blended"), byte_tokenizer)
    batches.batch(100)
    for known in batches._window._known.values():
        used = list(known.report.used_of_source.values())
        assert all(abs(count - share * sum(used)) <= 1 for count, share in zip(used, (0.5, 0.3, 0.2), strict=bool(used)))
    assert Cursor.from_json(batches.cursor(100)).sources[2].epochs > 3


def test_rows_of_sources_are_counted_as_they_are_used(folder, byte_tokenizer):
    """`use` adds up to what the reports of blocks say, with tokens, whatever the batches are."""
    for name in ("blended", "conversations", "in memory"):
        batches = load_dataset(kind_of(folder, name), byte_tokenizer)
        tokens = Counter()
        for step in range(6):
            for source, (_, count) in batches.use(step).items():
                tokens[source] += count
            expected = sum(int((batches.batch(step)["documents"] >= 0).sum()) for step in range(step + 1))
            assert tokens.total() == expected


@pytest.mark.parametrize("name", ["blended", "conversations dropped", "packed"])
def test_every_row_of_a_stream_is_used_or_has_a_reason(folder, byte_tokenizer, name):
    """At every cursor, and none of the damaged rows ends the run."""
    batches = load_dataset(kind_of(folder, name), byte_tokenizer)
    batches.batch(60)
    for step in range(0, 60, 7):
        report = stream_report(batches.cursor(step))
        assert report.num_rows == report.num_used + sum(report.unused.values())
    report = batches.report
    assert report.num_malformed > 20 and report.num_malformed == len(report.malformed)
    assert set(report.unused) == {"malformed", "empty"} if name != "conversations dropped" else {"malformed", "too long"}


def test_strict_streams_stop_at_a_malformed_row(folder, byte_tokenizer):
    """With its place."""
    batches = load_dataset(config(folder, strict=True), byte_tokenizer)
    with pytest.raises(DataError, match=r"data\.strict=true(.|\n)*\.jsonl:\d+: not JSON"):
        batches.batch(30)


def test_streams_without_a_row_are_refused(folder, byte_tokenizer):
    """Also from the process beside, whose error comes through."""
    for workers in (0, 1):
        batches = load_dataset(config(folder, "unlike.jsonl", workers=workers), byte_tokenizer)
        with pytest.raises(DataError, match=r"unlike\.jsonl has no row that can be used"):
            batches.batch(0)


def test_a_process_that_is_killed_is_named(folder, byte_tokenizer):
    """Whoever waits for a block is told, and can begin again."""
    batches = load_dataset(config(folder, workers=1), byte_tokenizer)
    first = batches.batch(0)
    batches._window.blocks._process.kill()
    with pytest.raises(DataError, match="ended with exit code -9"):
        batches.batch(50)
    assert torch.equal(batches.batch(50)["tokens"], load_dataset(config(folder), byte_tokenizer).batch(50)["tokens"])
    assert torch.equal(batches.batch(0)["tokens"], first["tokens"])
    batches.close()


def test_held_out_rows_are_not_trained_on(folder, byte_tokenizer):
    """Both sides together are all rows, neither has one of the other, and both can be stopped and go on."""
    everything = config(folder, shuffle_rows=500, batch_size=1)
    sides = load_dataset(everything, byte_tokenizer).split(0.3)
    seen = []
    for batches in sides:
        batches.batch(0)
        place = stream_report(batches.cursor(10**6))
        seen.append(
            {tokens for step in range(batches._window._behind.sequence) for tokens, _ in documents_of(batches.batch(step))}
        )
        assert place.num_rows == place.num_used + sum(place.unused.values())
    whole = load_dataset(replace(everything, stream=False), byte_tokenizer)
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == {tokens for step in range(whole.steps_per_epoch) for tokens, _ in documents_of(whole.batch(step))}
    assert 0.15 < len(seen[1]) / (len(seen[0]) + len(seen[1])) < 0.45
    assert sides[0].fingerprint != sides[1].fingerprint and not sides[1].shuffle
    with pytest.raises(ConfigError, match=r"\(0, 1\)"):
        sides[0].split(1.0)


def test_changed_files_are_noticed(folder, byte_tokenizer, tmp_path):
    """By a hash with the name of the source; and by the rows where a run goes on, if that hash did not tell."""
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {number:03d}"}) for number in range(200)]
    file.write_text("\n".join(lines))
    wanted = replace(config(folder), sources=(str(file),))
    batches = load_dataset(wanted, byte_tokenizer)
    batches.batch(6)
    cursor = batches.cursor(6)
    file.write_text("\n".join(line.replace("row", "new") for line in lines))
    other = load_dataset(wanted, byte_tokenizer)
    assert other.facts.keys() == {str(file)} and other.facts != batches.facts and other.fingerprint != batches.fingerprint
    other.go_to(cursor)
    with pytest.raises(DataError, match=r"other rows are in the files than when the checkpoint was written.*\n.*resume\.data"):
        other.batch(6)


def test_cursors_of_other_data_are_refused(folder, byte_tokenizer):
    """What is no cursor, and what is one of other sources."""
    batches = load_dataset(config(folder), byte_tokenizer)
    with pytest.raises(DataError, match="is no place in a stream"):
        batches.go_to({"step": 3})
    with pytest.raises(DataError, match="2 sources were read"):
        batches.go_to(Cursor.beginning(2).to_json())
    with pytest.raises(DataError, match="can be read at once"):
        load_dataset(config(folder, stream=False), byte_tokenizer).go_to(Cursor.beginning(3).to_json())


def test_malformed_rows_are_listed_as_they_are_read(folder, byte_tokenizer, tmp_path):
    """A run that goes on keeps the lines of rows before its cursor, and lists no row twice."""
    file = tmp_path / "malformed.jsonl"
    batches = load_dataset(kind_of(folder, "blended"), byte_tokenizer)
    listed = MalformedFile(file, 0)
    for step in (0, 3, 9, 20):
        batches.batch(step)
        listed.add_new(batches.report)
    expected = file.read_text()
    assert len(expected.splitlines()) == batches.report.num_malformed > 0
    for step in (0, 5, 12):
        again = load_dataset(kind_of(folder, "blended"), byte_tokenizer)
        cursor = batches.cursor(step)
        again.go_to(cursor)
        listed = MalformedFile(file, stream_report(cursor).num_malformed)
        for later in range(step, 21):
            again.batch(later)
            listed.add_new(again.report)
        assert file.read_text() == expected
