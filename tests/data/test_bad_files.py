"""Damaged and strange files: what can be used of them is, all else is counted with a reason, in bounded time and memory."""

import bz2
import gzip
import io
import json
import lzma
import re
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mpar.data.reading import find_sources
from mpar.data.rows import BadRow, Columns, MediaRow, Row, read_rows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {"messages": [USER, ANSWER]}
MOST_BYTES = 48 * 2**20


def lines(*rows):
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def chat(*messages, **columns):
    return {"messages": list(messages), **columns}


def parquet(**columns):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def arrow(**columns):
    sink, table = io.BytesIO(), pyarrow.table(columns)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


CAFE = chat({"role": "user", "content": "café"}, ANSWER)
# name: (content, rows that are used, a reason for each that is not)
FILES = {
    # encodings
    "bom.jsonl": (b"\xef\xbb\xbf" + lines(GOOD), 1, []),
    "utf-16.jsonl": (lines(GOOD, GOOD).decode().encode("utf-16"), 0, ["UTF-16"]),
    "utf-16 without a mark.jsonl": (lines(GOOD).decode().encode("utf-16-be"), 0, ["not JSON"]),
    "utf-32.jsonl": (lines(GOOD).decode().encode("utf-32"), 0, ["UTF-16 or UTF-32"]),
    "latin-1.jsonl": (lines(CAFE).decode().encode("latin-1") + lines(GOOD), 1, ["not UTF-8: .* at byte"]),
    "gbk.jsonl": (lines(chat({"role": "user", "content": "你好"}, ANSWER)).decode().encode("gbk"), 0, ["not UTF-8"]),
    "surrogate.jsonl": (b'{"query": "\\ud800", "response": "a"}\n', 0, ["half a surrogate pair"]),
    "crlf.jsonl": (lines(GOOD, GOOD).replace(b"\n", b"\r\n"), 2, []),
    "cr.jsonl": (lines(GOOD, GOOD).replace(b"\n", b"\r"), 0, ["not JSON: Extra data"]),
    "nul.jsonl": (lines(GOOD) + b"\0\0\0\n" + lines(GOOD), 2, ["not JSON"]),
    "nul in a text.jsonl": (b'{"query": "a\0b", "response": "a"}\n', 0, ["Invalid control character"]),
    # lines
    "blank.jsonl": (b"\n \n\t\n" + lines(GOOD), 1, []),
    "empty.jsonl": (b"", 0, []),
    "no end.jsonl": (lines(GOOD)[:-1], 1, []),
    "cut.jsonl": (lines(GOOD, GOOD)[:-9], 1, ["not JSON"]),
    "binary.jsonl": (bytes(range(256)) * 2, 0, ["not JSON", "not UTF-8", "not UTF-8"]),
    "huge.jsonl": (b'{"query": "' + b"x" * (9 << 20) + b'", "response": "a"}\n' + lines(GOOD), 1, ["more than 8 MiB"]),
    "deep.jsonl": (b"[" * 100_000 + b"\n" + lines(GOOD), 1, ["recursion"]),
    "digits.jsonl": (b'{"query": "q", "response": "a", "n": ' + b"9" * 400 + b"}\n", 0, ["400 digits"]),
    "nan.jsonl": (b'{"query": NaN}\n{"query": 1e999}\n', 0, ["NaN", "larger than any float"]),
    "twice.jsonl": (b'{"query": "q", "query": "q", "response": "a"}\n', 0, ["'query' occurs twice"]),
    "python.jsonl": (b"{'query': 'q', 'response': 'a'}\n", 0, ["double quotes"]),
    "list.jsonl": (json.dumps([GOOD]).encode(), 0, ["a JSON list, not an object"]),
    "scalars.jsonl": (b'1\n"text"\nnull\n', 0, ["a JSON int", "a JSON str", "a JSON NoneType"]),
    "two in one.jsonl": (lines(GOOD).strip() + lines(GOOD), 0, ["Extra data"]),
    # lists
    "object.json": (json.dumps(GOOD).encode(), 0, ["holds a list of rows"]),
    "lines.json": (lines(GOOD, GOOD), 0, ["one row a line is .jsonl"]),
    "cut.json": (json.dumps([GOOD, GOOD]).encode()[:-20], 1, ["not JSON"]),
    "comma.json": (b"[" + json.dumps(GOOD).encode() + b",]", 1, ["Expecting value"]),
    "behind.json": (json.dumps([GOOD]).encode() + b"x", 1, ["something follows"]),
    "empty.json": (b"", 0, ["holds a list of rows"]),
    # compressed
    "cut.jsonl.gz": (gzip.compress(lines(*[GOOD] * 500))[:-30], range(400, 500), ["ends too early"]),
    "plain.jsonl.gz": (lines(GOOD), 0, ["Not a gzipped file"]),
    "sum.jsonl.gz": (gzip.compress(lines(GOOD))[:-8] + bytes(8), 1, ["CRC check failed"]),
    "bomb.jsonl.gz": (gzip.compress(bytes(20 << 20)), 0, ["the line has more than 8 MiB"]),
    "cut.jsonl.bz2": (bz2.compress(lines(GOOD))[:-5], 1, ["ends too early"]),
    "cut.jsonl.xz": (lzma.compress(lines(GOOD))[:-5], 1, ["ends too early"]),
    "plain.jsonl.zst": (lines(GOOD), 0, ["not readable: zstd"]),
    "cut.jsonl.zst": (zstandard.compress(lines(*[GOOD] * 9))[:-3], 0, ["ends too early"]),
    "two frames.jsonl.zst": (zstandard.compress(lines(GOOD)) + zstandard.compress(lines(GOOD)), 2, []),
    "bomb.jsonl.zst": (zstandard.compress(bytes(20 << 20)), 0, ["the line has more than 8 MiB"]),
    # tables of text
    "nul.csv": (b"query,response\na\0,b\n", range(2), ["not CSV|NUL"]),
    "cells.csv": (b"query,response\na,b,c\nq,a\n", 1, ["3 cells, and the first line names 2"]),
    "quote.csv": (b'query,response\n"a,b\n', 0, ["unexpected end of data"]),
    "twice.csv": (b"query,query\na,b\n", 0, [r"names \['query'\] twice"]),
    "no header.csv": (b"", 0, ["no line that names columns"]),
    "semicolon.csv": (b"query;response\nq;a\n", 0, ["no known format: its columns are"]),
    "latin-1.csv": ("query,response\ncafé,b\n".encode("latin-1"), 0, ["not UTF-8"]),
    "bom and crlf.csv": (b"\xef\xbb\xbfquery,response\r\nq,a\r\n", 1, []),
    # tables
    "cut.parquet": (parquet(query=["q"], response=["a"])[:-20], 0, ["not readable as parquet"]),
    "not.parquet": (b"PAR1" + bytes(40), 0, ["not readable as parquet"]),
    "numbers.parquet": (parquet(query=[1], response=[1.5]), 0, ["content of type int"]),
    "null.parquet": (parquet(query=["q", None], response=["a", "b"]), 1, ["no query"]),
    "bytes.parquet": (parquet(query=[b"\xff"], response=[b"a"]), 0, ["content of type bytes"]),
    "nested.parquet": (parquet(messages=[[[1]]]), 0, ["not a list of objects"]),
    "cut.arrow": (arrow(query=["q"] * 9, response=["a"] * 9)[:-60], 0, ["Expected to be able to read"]),
    "not.arrow": (b"hello", 0, ["not readable as arrow"]),
    # rows
    "roles.jsonl": (
        lines(chat(USER, {"role": "robot", "content": "a"}), chat({"content": "x"}, ANSWER)), 0, ["role 'robot'", "role None"],
    ),
    "no messages.jsonl": (
        lines({"messages": []}, {"messages": None}, {"messages": {}}), 0, ["with at least one", "no known format", "not a list"],
    ),
    "no answer.jsonl": (lines(chat(USER), chat({"role": "system", "content": "s"})), 0, ["no assistant message"] * 2),
    "contents.jsonl": (
        lines(*[chat(USER, {"role": "assistant", "content": content}) for content in (None, 3, ["a", 3])]),
        0,
        ["NoneType", "content of type int", "a block of content that is 3"],
    ),
    "strings.jsonl": (lines({"messages": ["q", "a"]}, {"messages": "q"}), 0, ["not a list of objects"] * 2),
    "tools.jsonl": (
        lines(*[{**GOOD, "tools": tools} for tools in ("a hammer", '[{"name": "f"}]', 7)]),
        1,
        ["'tools' is a str, not a list", "'tools' is a int, not a list"],
    ),
    "calls.jsonl": (
        lines(chat(USER, {**ANSWER, "tool_calls": "f()"}), chat(USER, {"role": "tool_call", "content": "f()"})),
        0,
        ["'tool_calls' that are no list", "not JSON with a name"],
    ),
    "mixed.jsonl": (
        lines(GOOD, {"query": "q", "response": "a"}, {"text": "t"}, {"x": 1}, {"conversation": [{"from": "gpt", "value": "a"}]}),
        3,
        ["no known format", "no known format"],
    ),
    "two formats.jsonl": (lines({"query": "q", "response": "a", "question": "q", "answer": "a"}), 0, ["no known format"]),
    "media.jsonl": (lines({**GOOD, "images": ["x"]}, chat({"role": "user", "content": [{"type": "image_url"}]}, ANSWER)), 0, []),
    "history.jsonl": (
        lines(*[{"query": "q", "response": "a", "history": history} for history in ("no", [["one"]])]),
        0,
        ["'history' is not a list of"] * 2,
    ),
    "halves.jsonl": (
        lines({"query": "q"}, {"response": "a"}, {"instruction": "i"}, {"completion": "c"}),
        0,
        ["no response", "no query", "no output", "no known format"],
    ),
}  # fmt: skip


@pytest.mark.cases(len(FILES))  # milliseconds each
@pytest.mark.parametrize("name", FILES)
def test_a_reason_for_all_that_is_not_used(tmp_path, name):
    """Rows that are used, and why each other is not; no exception, and no more memory than two lines and their decompression."""
    content, used, reasons = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    tracemalloc.start()
    rows = list(read_rows("sft", find_sources("sft", [str(path)])[0], Columns()))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bad = [row for row in rows if isinstance(row, BadRow)]
    num_used = sum(isinstance(row, Row) for row in rows)
    if isinstance(used, range):  # by the version of Python or of the library
        assert num_used in used and len(bad) <= len(reasons)
    else:
        assert (num_used, len(bad)) == (used, len(reasons)), bad
    assert all(isinstance(row, Row | BadRow | MediaRow) for row in rows)
    assert all(re.search(reason, row.reason) and row.file == str(path) for row, reason in zip(bad, reasons, strict=False)), bad
    assert peak_bytes < MOST_BYTES
