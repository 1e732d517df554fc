"""Files of every format give the same rows; conversations of every shape are recognised; what cannot be used is counted."""

import bz2
import csv
import gzip
import json
import lzma
import re
import sys
from dataclasses import fields
from types import SimpleNamespace

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.data import DataConfig, Tokenizer, byte_tokenizer, load_dataset
from mpar.data._mix import rows_by_weight
from mpar.errors import ConfigError, DataError
from tests.tiers import examples

TURNS = [{"role": "user", "content": "why"}, {"role": "assistant", "content": 'because\nof, "it"'}]
ROWS = [{"messages": TURNS}, {"messages": [{"role": "system", "content": "s"}, *TURNS, *TURNS]}]


def config(*sources, kind="sft", **options):
    return DataConfig(**{"kind": kind, "sources": sources, "batch_size": 2, "seq_len": 512, "shuffle": False, **options})


def tokens(batches):
    """The ids of each document, in order."""
    data = batches.documents
    return [data.tokens[start : start + length + 1].tolist() for start, length in zip(data.starts, data.lengths, strict=True)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_csv(path, rows, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(rows[0])
        writer.writerows([value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows)


def write_stream(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def write_file(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "rows.csv": write_csv,
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "rows.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "stream.arrow": write_stream,
    "file.arrow": write_file,
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "rows.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(lines(rows))),
    "rows.jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(lines(rows))),
    "rows.jsonl.zst": lambda path, rows: path.write_bytes(b"".join(zstandard.compress(lines([row])) for row in rows)),
    "rows.csv.gz": lambda path, rows: (write_csv(path, rows), path.write_bytes(gzip.compress(path.read_bytes()))),
}  # fmt: skip


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(byte_tokenizer, write_rows, tmp_path, name):
    """Whatever the rows are written in, alone or in a folder, the documents are those of the lines of JSON."""
    (tmp_path / "sets").mkdir()
    WRITERS[name](tmp_path / "sets" / name, ROWS)
    expected = tokens(load_dataset(config(write_rows(*ROWS)), byte_tokenizer))
    for source in (str(tmp_path / "sets" / name), str(tmp_path / "sets")):
        batches = load_dataset(config(source), byte_tokenizer)
        assert tokens(batches) == expected
        assert batches.report.formats == {"messages": 2}


def test_files_of_other_file_systems(byte_tokenizer, write_rows):
    """An address is read through fsspec, one file or several, compressed or not; one that is not there is named."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/formats/a.jsonl", lines(ROWS[:1]))
    memory.pipe("/formats/b.jsonl.gz", gzip.compress(lines(ROWS[1:])))
    expected = tokens(load_dataset(config(write_rows(*ROWS)), byte_tokenizer))
    assert tokens(load_dataset(config("memory://formats/*"), byte_tokenizer)) == expected
    with pytest.raises(DataError, match=r"'memory://formats/c\.jsonl': there is no such file"):
        load_dataset(config("memory://formats/c.jsonl"), byte_tokenizer)


CALL = {"name": "add", "arguments": {"a": 1}}
CALLS = [{"type": "function", "function": CALL}]
SHAPES = {
    "prompt/completion": [
        {"prompt": "why", "completion": "so"},
        {"prompt": [{"role": "user", "content": "why"}], "completion": [{"role": "assistant", "content": "so"}]},
    ],
    "question/answer": [{"question": "why", "answer": "so"}],
    "problem/solution": [{"problem": "why", "solution": "so"}],
    "query/response": [{"query": "why", "response": "so"}, {"query": "why", "response": "so", "history": "[]"}],
    "instruction/output": [{"instruction": "why", "input": "", "output": "so"}],
    "conversations": [
        {"conversation": [{"from": "human", "value": "why"}, {"from": "bot", "value": "so"}]},
        {"conversations": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]},
    ],
    "messages": [
        {"messages": '[{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]'},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "why"}]}, {"role": "gpt", "content": ["s", "o"]}]},
        {"messages": [{"role": "human", "content": "why"}, {"role": "gpt", "content": "so", "weight": 1}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_conversations(byte_tokenizer, write_rows, name):
    """Every shape of the same question and answer is the same document, under the name of its format."""
    expected = tokens(load_dataset(config(write_rows({"query": "why", "response": "so"})), byte_tokenizer))
    batches = load_dataset(config(write_rows(*SHAPES[name])), byte_tokenizer)
    assert tokens(batches) == expected * len(SHAPES[name])
    assert batches.report.formats == {name: len(SHAPES[name])}


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {**CALL, "arguments": '{"a": 1}'}}]},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
    ],
    ids=["openai", "arguments as text", "ms-swift", "sharegpt"],
)
def test_calls_of_tools(merged_backend, write_rows, call):
    """Calls reach the template as OpenAI writes them, with arguments as an object, and results as messages of the tool."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %};{% endfor %}"
    )
    tokenizer = Tokenizer(merged_backend, special={"eos_token": "<|end|>"}, chat_template=template)
    key = "conversations" if "from" in call else "messages"
    turns = [
        {"role": "user", "content": "2?"},
        call,
        {"role": "observation", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    batches = load_dataset(config(write_rows({key: turns, "tools": "[]"}), token_weights="last_round"), tokenizer)
    assert tokenizer.decode(tokens(batches)[0]) == "user:2?;assistant:[add 1];tool:2;assistant:2;"


def test_calls_that_a_template_leaves_out_are_malformed(byte_tokenizer, write_rows):
    """A template without tools would show an empty answer where a function was called."""
    called = {"role": "assistant", "content": "", "tool_calls": CALLS}
    rows = [{"messages": [{"role": "user", "content": "2?"}, turn]} for turn in (called, {"role": "assistant", "content": "2"})]
    batches = load_dataset(config(write_rows(*rows)), byte_tokenizer)
    assert batches.report.num_malformed == 1 and "calls the function 'add'" in batches.report.malformed[0].reason


def test_media_are_counted_and_not_trained_on(byte_tokenizer, write_rows):
    """Rows with images, sound or video, in a column or in a message, are left out; an empty column is no image."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    rows = [
        {"messages": TURNS, "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "what"}, image]}, TURNS[1]]},
        {"query": "q", "response": "a", "audios": ["a.wav"]},
        {"messages": TURNS, "images": []},
    ]
    report = load_dataset(config(write_rows(*rows)), byte_tokenizer).report
    assert (report.num_rows, report.num_used, report.num_media) == (4, 1, 3)
    assert "3 with media" in str(report)


def test_columns_are_renamed(byte_tokenizer, write_rows):
    """Names of the user's stand for those of a format, whose own column of that name gives way; unknown ones are refused."""
    row = {"ask": "why", "reply": "so", "query": "an id"}
    expected = tokens(load_dataset(config(write_rows({"query": "why", "response": "so"})), byte_tokenizer))
    renamed = config(write_rows(row), columns={"ask": "query", "reply": "response"})
    assert tokens(load_dataset(renamed, byte_tokenizer)) == expected
    others = load_dataset(config(write_rows(row), columns={"ask": "query", "reply": "response", "sys": "system"}), byte_tokenizer)
    assert str(others.report).endswith("data.columns names sys, which no row has")
    with pytest.raises(DataError, match=r"data\.columns names Ask, repyl, which no row has"):
        load_dataset(config(write_rows({"ask": "why"}), columns={"Ask": "query", "repyl": "response"}), byte_tokenizer)
    with pytest.raises(ConfigError, match="columns maps to answre, which no format has; formats have messages"):
        load_dataset(config(write_rows(row), columns={"reply": "answre"}), byte_tokenizer)


OWN = """
def rows(row):
    if row["n"] == 0:
        return None
    if row["n"] == 1:
        raise KeyError("one")
    if row["n"] == 2:
        return "two"
    return [{"query": row["question"], "response": str(i)} for i in range(row["n"])]
"""


def test_rows_go_through_the_users_own_function(byte_tokenizer, write_rows, tmp_path, monkeypatch):
    """It may leave a row out or make several of it; a row for which it raises or returns something else is malformed; a change
    of its code makes the tokenised data anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rows_of_a_test.py").write_text(OWN)
    path = write_rows(*[{"asked": "why", "n": n} for n in range(4)])
    wanted = config(path, preprocess="own_rows_of_a_test:rows", columns={"asked": "question"}, cache_dir=str(tmp_path / "cache"))
    report = load_dataset(wanted, byte_tokenizer).report
    assert (report.num_rows, report.num_used, report.num_filtered, report.num_malformed) == (6, 3, 1, 2)
    assert "own_rows_of_a_test:rows raised KeyError" in report.first_malformed
    assert "returned 'two'" in str(report.malformed[1])
    assert "1 left out by data.preprocess" in str(report)
    assert load_dataset(wanted, byte_tokenizer).report.cached
    (tmp_path / "own_rows_of_a_test.py").write_text("# another\n" + OWN)
    assert not load_dataset(wanted, byte_tokenizer).report.cached
    with pytest.raises(ConfigError, match=r"own_rows_of_a_test .* has no 'row'; did you mean 'rows'"):
        load_dataset(config(path, preprocess="own_rows_of_a_test:row"), byte_tokenizer)


def test_text_in_rows(byte_tokenizer, write_rows, tmp_path):
    """Plain text comes from `text` or `content` of rows, from columns that are mapped, and from files in folders."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text("one")
    write_csv(tmp_path / "texts" / "b.csv", [{"body": 1}])
    (tmp_path / "texts" / ".hidden.txt").write_text("not this")
    batches = load_dataset(config(str(tmp_path / "texts"), kind="pt", columns={"body": "text"}), byte_tokenizer)
    assert [byte_tokenizer.decode(ids[:-1]) for ids in tokens(batches)] == ["one", "1"]
    batches = load_dataset(config(write_rows({"content": "two"}), kind="pt"), byte_tokenizer)
    assert byte_tokenizer.decode(tokens(batches)[0][:-1]) == "two"


@pytest.mark.parametrize("markers", [True, False])
def test_answers_without_loss(byte_tokenizer, merged_backend, write_rows, markers):
    """An answer with `"loss": false` is context: it is not trained on, with a template that marks answers and without."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = byte_tokenizer if markers else Tokenizer(merged_backend, special={"eos_token": "<|end|>"}, chat_template=plain)
    turns = [TURNS[0], {**TURNS[1], "content": "no", "loss": False}, TURNS[0], {**TURNS[1], "content": "yes", "loss": True}]
    batch = load_dataset(config(write_rows({"messages": turns})), tokenizer).batch(0)
    trained = tokenizer.decode([i for i in batch["labels"][0].tolist() if i != -100])
    assert trained == ("yes<|im_end|>" if markers else "yes<|end|>")


@pytest.mark.parametrize("truncation", ["left", "right", "split"])
def test_what_is_kept_of_long_conversations(byte_tokenizer, write_rows, truncation):
    """The beginning, the end, or all of it in documents of which each begins with the last token of the one before."""
    row = {"query": "q" * 20, "response": "".join(chr(97 + i % 26) for i in range(100))}
    whole = tokens(load_dataset(config(write_rows(row)), byte_tokenizer))[0]
    cut = load_dataset(config(write_rows(row), seq_len=50, truncation=truncation), byte_tokenizer)
    expected = {"left": [whole[-51:]], "right": [whole[:51]], "split": [whole[i : i + 51] for i in range(0, len(whole) - 1, 50)]}
    assert tokens(cut) == expected[truncation]
    assert (cut.report.num_used, cut.report.num_too_long, cut.report.num_dropped) == (1, 1, 0)


def test_sources_by_weight(byte_tokenizer, write_rows):
    """With stop=first no row is repeated and one source is used up; with stop=all none is left out. Both are counted."""
    small = write_rows(*[{"query": "s", "response": str(i)} for i in range(4)], name="small.jsonl")
    large = write_rows(*[{"query": "l", "response": str(i)} for i in range(10)], name="large.jsonl")
    for stop, used, repeated, unmixed in (("first", [4, 4], 0, 6), ("all", [4, 10], 6, 0)):
        batches = load_dataset(config(small, large, weights=(0.5, 0.5), stop=stop), byte_tokenizer)
        report, total = batches.report, 2 * (4 if stop == "first" else 10)
        assert len(batches.documents) == report.num_documents == total
        assert list(report.used_of_source.values()) == used
        assert (report.num_used, report.num_repeated, report.num_unmixed) == (sum(used), repeated, unmixed)
    with pytest.raises(ConfigError, match="weights has 1 numbers for 2 sources"):
        load_dataset(config(small, large, weights=(1.0,)), byte_tokenizer)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000)), min_size=1, max_size=5))
def test_rows_by_weight(given_sources):
    """The ratios are those of the weights up to a row; `first` takes no more than there is, `all` no less."""
    weights, sizes = zip(*given_sources, strict=True)
    for stop in ("first", "all"):
        counts = rows_by_weight(weights, sizes, stop)
        scale = (min if stop == "first" else max)(size / weight for weight, size in given_sources)
        assert all(abs(count - weight * scale) <= 1 for count, weight in zip(counts, weights, strict=True))
        within = [count <= size if stop == "first" else count >= size for count, size in zip(counts, sizes, strict=True)]
        assert all(within) and any(count == size for count, size in zip(counts, sizes, strict=True))


GOOD_ROWS = st.sampled_from([{"query": "q", "response": "a"}, {"messages": TURNS}, {"prompt": "p", "completion": "c"}])
BAD_ROWS = st.sampled_from(
    [
        {"query": "q"},
        {"messages": []},
        {"messages": [{"role": "x", "content": "y"}]},
        {"chosen": TURNS, "rejected": TURNS},
        {"prompt": "p", "completion": "c", "label": False},
        {"images": ["a"], "query": "q", "response": "a"},
        {"query": "q" * 900, "response": "a"},
        {"query": "q", "response": "a" * 900},
        {},
    ]
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv"])
def test_every_row_is_accounted_for(byte_tokenizer, tmp_path_factory, name):
    """Rows in are rows used, malformed, empty, with media, or dropped, whatever the format of the file and the truncation."""

    @settings(max_examples=examples(25))
    @given(st.lists(GOOD_ROWS | BAD_ROWS, max_size=8), st.sampled_from(["drop", "left", "right", "split"]))
    def check(rows, truncation):
        rows = [{"query": "q", "response": "a"}, *rows]
        path = tmp_path_factory.mktemp("rows") / name
        if name == "rows.jsonl":
            path.write_bytes(lines(rows))
        elif name == "rows.csv":
            keys = sorted({key for row in rows for key in row})
            write_csv(path, [{key: row.get(key, "") for key in keys} for row in rows])
        elif name == "rows.parquet":
            WRITERS[name](path, [{"row": json.dumps(row), **{k: v for k, v in row.items() if k != "label"}} for row in rows])
        else:
            WRITERS[name](path, rows)
        report = load_dataset(config(str(path), truncation=truncation), byte_tokenizer).report
        assert report.num_rows == len(rows)
        parts = (report.num_used, report.num_malformed, report.num_empty, report.num_media, report.num_dropped)
        assert sum(parts) == report.num_rows, report
        assert sum(report.formats.values()) == report.num_used == sum(report.used_of_source.values())

    check()


DAMAGED = {
    "cut.jsonl.gz": (lambda: gzip.compress(lines(ROWS * 50))[:-20], "ends too early"),
    "not.jsonl.gz": (lambda: lines(ROWS), "[Nn]ot a gzipped file"),
    "not.jsonl.zst": (lambda: lines(ROWS), "not readable"),
    "not.parquet": (lambda: b"PAR1" + b"\0" * 40, "not readable as parquet"),
    "not.arrow": (lambda: b"hello", "not readable as arrow"),
    "cells.csv": (lambda: b"query,response\na,b,c\n", "3 cells, and the first line names 2 columns"),
    "twice.csv": (lambda: b"query,query\na,b\n", r"names \['query'\] twice"),
    "quote.csv": (lambda: b'query,response\n"a,b\n', "not CSV: unexpected end of data"),
    "nul.csv": (lambda: b"query,response\na\0,b\n", "not CSV|line contains NUL|no token|half"),
    "latin.csv": (lambda: "query,response\ncafé,b\n".encode("latin-1"), "not UTF-8"),
    "header.csv": (lambda: b"", "no line that names columns"),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named_and_do_not_end_the_run(byte_tokenizer, write_rows, tmp_path, name):
    """What a damaged file holds before the damage is used; the damage is one malformed row, with its file and a reason."""
    content, reason = DAMAGED[name]
    (tmp_path / name).write_bytes(content())
    report = load_dataset(config(write_rows(*ROWS), str(tmp_path / name)), byte_tokenizer).report
    if name == "nul.csv":  # Python 3.11 reads a zero byte as a character like any other
        assert report.num_used + report.num_malformed == 3
        return
    assert report.num_malformed == 1 and report.num_used >= 2
    assert re.search(reason, report.first_malformed), report.first_malformed
    assert name in report.first_malformed


def test_reports_have_every_count_in_words(byte_tokenizer, write_rows):
    """Each number of a report is in its line when it is not 0."""
    first = write_rows({"query": "q", "response": "a"}, name="a.jsonl")
    second = write_rows({"query": "q", "response": "a"}, name="b.jsonl")
    text = str(load_dataset(config(first, second), byte_tokenizer).report)
    assert f"1 of {first}; 1 of {second}" in text
    assert {field.name for field in fields(type(load_dataset(config(first), byte_tokenizer).report))} >= {"used_of_source"}


def test_data_sets_of_the_hub_come_from_the_library(tmp_path, monkeypatch):
    """The files in which `datasets` keeps the split that is named; what it cannot load is told with what it says."""
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(tmp_path / "kept.arrow"), table.schema) as writer:
        writer.write_table(table)
    asked = []

    def load(name, split):
        asked.append((name, split))
        if name == "offline":
            raise ConnectionError("Couldn't reach the Hub\nin any way")
        return SimpleNamespace(cache_files=[{"filename": str(tmp_path / "kept.arrow")}] if name != "memory" else [])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    kept = load_dataset(config("hf::owner/name:test#1"), byte_tokenizer())
    assert kept.report.num_used == 1 and asked == [("owner/name", "test")]
    with pytest.raises(DataError, match=r"datasets cannot load it here \(Couldn't reach the Hub\); where it can"):
        load_dataset(config("hf::offline"), byte_tokenizer())
    with pytest.raises(DataError, match="keeps it in memory"):
        load_dataset(config("hf::memory"), byte_tokenizer())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        load_dataset(config("hf::owner/name"), byte_tokenizer())
    with pytest.raises(DataError, match=r"MsDataset.load"):
        load_dataset(config("ms::owner/name"), byte_tokenizer())
