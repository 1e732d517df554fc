"""Answers in steps: which positions have labels, and rows that cannot be used."""

import json

import pytest

from mpar.data import Answers, DataConfig, byte_tokenizer, load_dataset
from mpar.errors import ConfigError

ROWS = [
    {"prompt": "1+2+3?", "completions": ["1+2 is 3.", "3+3 is 7."], "labels": [True, False]},
    {"messages": [{"role": "user", "content": "2*2?"}], "completions": ["It is 4."], "labels": [1]},
]


def loaded(folder, rows, seq_len=96, **changes):
    """Batches of one row with these rows of data, and their tokenizer."""
    path = folder / "steps.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    answers = Answers(4, ("step_labels",), scored=True)
    config = DataConfig("prm", (str(path),), 1, seq_len, shuffle=False, answers=answers, **changes)
    tokenizer = byte_tokenizer()
    return load_dataset(config, tokenizer, vocab_size=tokenizer.vocab_size), tokenizer


def test_the_last_token_of_each_step_has_its_label(tmp_path):
    """What stands before a labelled position, and behind the one before, is a step with its line break."""
    batches, tokenizer = loaded(tmp_path, ROWS, packing=False)
    for step, row in enumerate(ROWS):
        batch = batches.batch(step)
        tokens, labels = batch["tokens"][0], batch["step_labels"][0]
        places = (labels >= 0).nonzero()[:, 0].tolist()
        assert [int(labels[place]) for place in places] == [int(label) for label in row["labels"]]
        begins = [places[0] + 1 - len(row["completions"][0]) - 1, *(place + 1 for place in places)]
        for begin, place, text in zip(begins, places, row["completions"], strict=False):
            assert tokenizer.decode(tokens[begin : place + 1].tolist()) == f"{text}\n"


def test_a_row_that_is_cut_keeps_the_labels_of_the_steps_that_it_has(tmp_path):
    """Cut behind its first step, it has one label; the question is never cut off."""
    whole, _ = loaded(tmp_path, ROWS[:1])
    end = int((whole.batch(0)["step_labels"][0] >= 0).nonzero()[0])
    batches, _ = loaded(tmp_path, ROWS[:1], seq_len=end + 3, truncation="right")
    labels = batches.batch(0)["step_labels"][0]
    assert labels[labels >= 0].tolist() == [1]
    with pytest.raises(ConfigError, match="truncation=left would take the question away"):
        loaded(tmp_path, ROWS, truncation="left")


def test_rows_that_are_no_steps_are_named(tmp_path):
    """Each says what it lacks."""
    wrong = [
        {"prompt": "a?", "completions": ["b"], "labels": [True, False]},
        {"prompt": "a?", "completions": [], "labels": []},
        {"prompt": "a?", "completions": ["b"], "labels": ["yes"]},
        {"completions": ["b"], "labels": [True]},
    ]
    batches, _ = loaded(tmp_path, [*ROWS, *wrong])
    assert batches.report.num_used == 2
    reasons = "\n".join(str(row) for row in batches.report.malformed)
    for part in (":3: 1 completions have 2 labels", ":4: 'completions' is []", ":5: 'labels' is ['yes']", ":6: no question"):
        assert part in reasons
