"""Prompts: rows with a question, whose other columns travel on."""

import json

import pytest

from mpar.data import DataConfig, byte_tokenizer, load_dataset
from mpar.errors import DataError
from mpar.rollouts import Prompts

ROWS = [
    {"question": "1+1", "answer": "2", "level": 3},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]},
    {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}], "tests": "assert f()"},
    {"prompt": "x" * 90, "answer": "too long"},
    {"answer": "no question"},
]


def test_questions_are_rendered_and_columns_travel(tmp_path):
    """Answers behind the last question are left out, long prompts and rows without a question are counted."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    tokenizer = byte_tokenizer()
    batches = load_dataset(DataConfig(kind="prompt", sources=(str(file),), batch_size=1, seq_len=64), tokenizer)
    assert (batches.report.num_used, batches.report.num_dropped, batches.report.num_malformed) == (3, 1, 1)
    assert "no question: its columns are ['answer']" in batches.report.malformed[0].reason
    prompts = Prompts(batches.documents, seed=0, shuffle=False)
    found = [prompts.take(number) for number in range(3)]
    assert [prompt.text for prompt in found] == ["1+1", "c", "d"]
    assert [prompt.columns for prompt in found] == [{"answer": "2", "level": 3}, {}, {"tests": "assert f()"}]
    assert found[0].messages == ({"role": "user", "content": "1+1"},)
    assert [message["content"] for message in found[1].messages] == ["a", "b", "c"]
    assert [message["role"] for message in found[1].messages] == ["user", "assistant", "user"]
    assert [message["content"] for message in found[2].messages] == ["d"]
    assert tokenizer.decode(found[1].ids).endswith("b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert found[0].name.endswith("prompts.jsonl:1")


def test_every_epoch_and_attempt_has_an_order_of_its_own(tmp_path):
    """Each takes every prompt once; the order depends on the seed alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question": str(i)}) + "\n" for i in range(20)), encoding="utf-8")
    documents = load_dataset(
        DataConfig(kind="prompt", sources=(str(file),), batch_size=1, seq_len=64), byte_tokenizer()
    ).documents
    prompts = Prompts(documents, seed=1, shuffle=True)
    orders = {(epoch, a): [prompts.take(20 * epoch + i, a).text for i in range(20)] for epoch in (0, 1) for a in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order, key=int) == [str(i) for i in range(20)] for order in orders.values())
    again = Prompts(documents, seed=1, shuffle=True)
    assert [again.take(20 + i, 1).text for i in range(20)] == orders[1, 1]


def test_a_file_without_questions_is_no_data(tmp_path):
    """The error says which columns a question may be in."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="no question: its columns are"):
        load_dataset(DataConfig(kind="prompt", sources=(str(file),), batch_size=1, seq_len=64), byte_tokenizer())
