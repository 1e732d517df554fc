"""Pairs of a preferred and a rejected answer, and answers with a label: as rows, as documents, and as nothing to train on yet."""

import pytest

from mpar.cli import main
from mpar.data import DataConfig, data_stats, load_dataset
from mpar.errors import ConfigError

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "why"), ("assistant", "so"), ("assistant", "no")))
SYSTEM = {"role": "system", "content": "Be kind."}
PAIRS = {
    "prompt/chosen/rejected": [
        {"prompt": "why", "chosen": "so", "rejected": "no"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": '[{"role": "user", "content": "why"}]', "chosen": "so", "rejected": "no"},
        {"instruction": "why", "input": "", "chosen": "so", "rejected": "no"},
        {"question": "why", "chosen": "so", "rejected": BAD},
        {
            "conversations": [{"from": "human", "value": "why"}],
            "chosen": {"from": "gpt", "value": "so"},
            "rejected": {"from": "gpt", "value": "no"},
        },
    ],
    "chosen/rejected": [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}],
    "messages with a rejected one": [
        {"messages": [USER, GOOD], "rejected_response": "no"},
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"messages": [USER, GOOD], "rejected_response": [BAD]},
    ],
}


def config(path, kind="preference", **options):
    return DataConfig(**{"kind": kind, "sources": (path,), "batch_size": 2, "seq_len": 64, "shuffle": False, **options})


def documents_of(batches, tokenizer):
    """By document its whole text and that of its labels."""
    found = []
    documents = batches.documents
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        ids, trained = documents.tokens[start : start + length + 1], documents.trained[start : start + length + 1]
        found.append((tokenizer.decode(ids), tokenizer.decode(ids[trained])))
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_every_shape_of_a_pair_is_the_same_two_documents(byte_tokenizer, write_rows, name):
    """The preferred one first; trained on is what they do not share."""
    start = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    batches = load_dataset(config(write_rows(*PAIRS[name])), byte_tokenizer)
    expected = [(f"{start}{answer}<|im_end|>\n", f"{answer}<|im_end|>") for answer in ("so", "no")]
    assert documents_of(batches, byte_tokenizer) == expected * len(PAIRS[name])
    assert batches.report.formats == {name: len(PAIRS[name])}
    assert batches.documents.pairs


def test_earlier_answers_and_other_columns(byte_tokenizer, write_rows, tmp_path):
    """Answers that both have are not trained on; a margin is a number; what no format reads stays with its row, also cached."""
    turns = [SYSTEM, USER, GOOD, USER]
    row = {"chosen": [*turns, GOOD], "rejected": [*turns, BAD], "margin": "1.5", "source": "web", "id": 7}
    path = write_rows({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, row)
    for cached in (False, True):
        batches = load_dataset(config(path, seq_len=256, cache_dir=str(tmp_path / "cache")), byte_tokenizer)
        assert batches.report.cached == cached
        assert [trained for _, trained in documents_of(batches, byte_tokenizer)] == ["so<|im_end|>", "no<|im_end|>"] * 2
        assert dict(batches.documents.columns) == {1: {"margin": 1.5, "source": "web", "id": 7}}
        names = [name.replace(path, "") for row in (0, 1) for name in batches.names(0, row)]
        assert sorted(names) == [
            ":1 chosen", ":1 rejected", ":2 chosen margin=1.5 source='web' id=7", ":2 rejected margin=1.5 source='web' id=7",
        ]  # fmt: skip
        assert ("  with margin", "1 rows, 1.5 on average") in data_stats(batches).lines()


def test_pairs_stay_together(byte_tokenizer, write_rows):
    """A pair of which one is too long is dropped; held-out rows are whole pairs; pairs are not divided."""
    rows = [{"prompt": "why", "chosen": "so" * n, "rejected": "no"} for n in (1, 2, 3, 40)]
    path = write_rows(*rows)
    batches = load_dataset(config(path), byte_tokenizer)
    assert (batches.report.num_used, batches.report.num_dropped, len(batches.documents)) == (3, 1, 6)
    for part in batches.split(0.3):
        texts = [text for _, text in documents_of(part, byte_tokenizer)]
        assert [text.startswith("no") for text in texts] == [False, True] * (len(texts) // 2)
    with pytest.raises(ConfigError, match="truncation=split would divide"):
        load_dataset(config(path, truncation="split"), byte_tokenizer)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "why", "chosen": "so"}, "no rejected"),
        ({"prompt": "why", "chosen": "so", "rejected": "so"}, "are the same"),
        ({"chosen": "so", "rejected": "no"}, "'chosen' is not a list"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "?"}, BAD]}, "do not begin with the same question"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "rejected does not end with an answer"),
        ({"prompt": "why", "chosen": 3, "rejected": "no"}, "'chosen' is 3, not a text"),
        ({"prompt": "why", "chosen": "so", "rejected": "no", "margin": "much"}, "'margin' is 'much', not a number"),
        ({"messages": [USER, GOOD]}, "no chosen: a pair has chosen and rejected"),
        ({"messages": [USER, GOOD], "rejected_messages": "no"}, "'rejected_messages' is not a list"),
    ],
    ids=str,
)
def test_pairs_that_are_none(byte_tokenizer, write_rows, row, reason):
    """They are malformed, with the reason."""
    report = load_dataset(config(write_rows(row, PAIRS["chosen/rejected"][0])), byte_tokenizer).report
    assert (report.num_used, report.num_malformed) == (1, 1)
    assert reason in report.first_malformed


def test_answers_with_a_label(byte_tokenizer, write_rows):
    """Labels are true or false in any spelling of tables; other rows are malformed."""
    labels = [True, False, "true", "False", 1, 0, "0", 1.0]
    rows = [{"prompt": "why", "completion": "so", "label": label} for label in labels]
    rows += [{"messages": [USER, GOOD, USER, BAD], "label": False}]
    bad = [{"prompt": "why", "completion": "so", "label": label} for label in (None, "good", 2, [])]
    batches = load_dataset(config(write_rows(*rows, *bad), kind="kto", seq_len=128), byte_tokenizer)
    found = [batches.documents.columns[row]["label"] for row in range(len(rows))]
    assert found == [True, False, True, False, True, False, False, True, False]
    assert (batches.report.num_used, batches.report.num_malformed) == (len(rows), len(bad))
    assert documents_of(batches, byte_tokenizer)[-1][1] == "no<|im_end|>"
    assert ("  with label", "9 rows, 4 of them true") in data_stats(batches).lines()


def test_no_task_trains_on_them(write_rows, tmp_path, capsys):
    """`mpar data` reads them; `mpar train` refuses them without a task that learns from them, and says what can be done."""
    path = write_rows(*PAIRS["chosen/rejected"])
    words = ["data=jsonl", f"data.sources=[{path}]", "data.seq_len=64"]
    assert main.main(["data", "show", *words, "task.kind=preference"]) == 0
    assert ":1 rejected" in capsys.readouterr().out
    assert main.main(["train", *words, "task.kind=preference", "mesh=one", "strategy=ddp"]) != 0
    assert "task.learn=next_token, which learns from sft or pt" in capsys.readouterr().err
    assert main.main(["train", *words, "mesh=one", "strategy=ddp", f"run_dir={tmp_path}/run"]) != 0
    assert "task.kind=preference reads it" in capsys.readouterr().err
