"""What batches say of answers: which labels count for which, pairs in one sequence, numbers of rows, mismatched answers."""

import dataclasses

import numpy as np
import pytest

from mpar.data import Answers, DataConfig, load_dataset
from mpar.errors import ConfigError, DataError

KEYS = ("answers", "indices", "ends", "signs", "beta", "reference_logps")
PAIRS = Answers(6, KEYS)


def config(path, kind="preference", answers=PAIRS, **options):
    defaults = {"batch_size": 2, "seq_len": 128, "answers": answers}
    return DataConfig(**{"kind": kind, "sources": (path,), **defaults, **options})


def rows_of_pairs(count):
    return [
        {"prompt": "q" * (1 + i % 5), "chosen": "yes" * (1 + i % 7), "rejected": "no" * (1 + i % 4), "beta": 0.1 * (i + 1)}
        for i in range(count)
    ]


def all_rows(batches, epoch=0):
    steps = batches.steps_per_epoch
    for step in range(epoch * steps, (epoch + 1) * steps):
        batch = batches.batch(step)
        for row in range(batches.shape.batch_size):
            yield {key: x[row].numpy() for key, x in batch.items()}, batches.documents_in(step, row)


@pytest.mark.parametrize("pad_to_multiple", [1, 8])
def test_pairs(byte_tokenizer, write_rows, pad_to_multiple):
    """Both answers of a pair are neighbours in one sequence, in every epoch; entries say what the documents are."""
    batches = load_dataset(config(write_rows(*rows_of_pairs(40)), pad_to_multiple=pad_to_multiple), byte_tokenizer)
    logps = -np.arange(len(batches.documents), dtype=np.float32)
    batches = batches.with_reference_logps(logps)
    for epoch in (0, 1):
        seen = []
        for row, documents in all_rows(batches, epoch):
            count = len(documents)
            assert count <= 6
            assert (row["signs"] == [1, 0] * (count // 2) + [-1] * (6 - count)).all()
            assert (documents[1::2] == documents[::2] + 1).all() and (documents[::2] % 2 == 0).all()
            for number, document in enumerate(documents):
                place = np.flatnonzero(row["documents"] == number)
                assert place[0] % pad_to_multiple == 0
                counted = row["labels"][place] != -100
                assert (row["answers"][place] == np.where(counted, number, -1)).all()
                assert (row["indices"][place][counted] == np.arange(counted.sum())).all()
                assert (np.flatnonzero(row["ends"] == number) == place[-1:]).all()
                assert row["beta"][number] == np.float32(0.1 * (document // 2 + 1))
                assert row["reference_logps"][number] == logps[document]
            assert (row["beta"][count:] == 0).all()
            seen += documents.tolist()
        assert sorted(seen) == list(range(80))


def test_streams_and_split(byte_tokenizer, write_rows):
    """A stream packs pairs as data in memory do; held-out rows are pairs."""
    path = write_rows(*rows_of_pairs(30))
    entire, streamed = (
        load_dataset(config(path, stream=stream, workers=0, shuffle=False, shuffle_rows=30), byte_tokenizer)
        for stream in (False, True)
    )
    for step in range(entire.steps_per_epoch - 1):
        ours, theirs = streamed.batch(step), entire.batch(step)
        assert all((ours[key] == theirs[key]).all() for key in theirs)
    training, held_out = entire.split(0.2)
    assert len(training.documents) == 48
    assert {tuple(row["signs"]) for row, _ in all_rows(held_out)} <= {
        (1, 0, 1, 0, 1, 0),
        (1, 0, 1, 0, -1, -1),
        (1, 0) + (-1,) * 4,
        (-1,) * 6,
    }


def test_long_pairs(byte_tokenizer, write_rows):
    """A pair that does not fit is dropped, or the longer answer is cut to what the other leaves."""
    rows = [{"prompt": "q", "chosen": "y" * 90, "rejected": "n" * 5}, {"prompt": "q", "chosen": "y", "rejected": "n", "x": 1}]
    path = write_rows(*rows)
    answers = Answers(2, ("answers", "signs"))
    dropped = load_dataset(config(path, answers=answers), byte_tokenizer)
    assert (dropped.report.num_used, dropped.report.num_too_long, dropped.report.num_dropped) == (1, 1, 1)
    cut = load_dataset(config(path, answers=answers, truncation="right"), byte_tokenizer)
    lengths = cut.documents.lengths.tolist()
    assert lengths[0] + lengths[1] == 128
    with pytest.raises(DataError, match="which it shares with another answer"):
        load_dataset(config(path, answers=answers, truncation="error"), byte_tokenizer)


def test_scores_and_prompts(byte_tokenizer, write_rows):
    """Where answers are scored, the last token has a position; where prompts are learned, every position has a label."""
    path = write_rows(*rows_of_pairs(4))
    plain = load_dataset(config(path, shuffle=False), byte_tokenizer)
    scored = load_dataset(config(path, shuffle=False, answers=dataclasses.replace(PAIRS, scored=True)), byte_tokenizer)
    assert (scored.documents.lengths == plain.documents.lengths + 1).all()
    row = scored.batch(0)
    last = row["tokens"][0][row["ends"][0] == 0]
    assert byte_tokenizer.decode(last.tolist()) == "\n"  # which ends the template's message, as in the conversation itself
    prompts = load_dataset(config(path, shuffle=False, answers=dataclasses.replace(PAIRS, prompts=True)), byte_tokenizer)
    batch, before = prompts.batch(0), plain.batch(0)
    assert ((batch["labels"] != -100) == (batch["documents"] >= 0)).all()
    assert (batch["answers"] == before["answers"]).all()


def test_mismatched(byte_tokenizer, write_rows):
    """Behind each document one with its question and the answer of the row before; both fit into half a sequence each."""
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}", "label": i % 2 == 0} for i in range(5)]
    answers = Answers(4, ("answers", "signs"), mismatched=True)
    batches = load_dataset(config(write_rows(*rows), "kto", answers, shuffle=False), byte_tokenizer)
    found = set()
    for row, documents in all_rows(batches):
        for number, document in enumerate(documents):
            place = np.flatnonzero(row["documents"] == number)
            text = byte_tokenizer.decode([*row["tokens"][place].tolist(), row["labels"][place][-1] % 100])
            asked, answered = (int(part[0]) for part in text.replace("answer ", "question ").split("question ")[1:])
            found.add((asked, answered, int(row["signs"][number])))
            assert document % 2 == (row["signs"][number] == 2)
    assert found == {(i, i, int(i % 2 == 0)) for i in range(5)} | {(i, (i - 1) % 5, 2) for i in range(5)}


def test_refused(byte_tokenizer, write_rows):
    """Rows that lack a number, and sequences that cannot hold two answers."""
    with pytest.raises(DataError, match=r"(?s):1: beta is missing.*:2: beta is 'x', not a number"):
        load_dataset(
            config(
                write_rows(
                    {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "d", "beta": "x"}
                )
            ),
            byte_tokenizer,
        )
    with pytest.raises(ConfigError, match="no room for two"):
        load_dataset(config(write_rows(*rows_of_pairs(1)), answers=Answers(1, ("signs",))), byte_tokenizer)
