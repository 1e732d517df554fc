"""Every row that is read is used, or counted with a reason: in all formats, in memory and in streams."""

import csv
import gzip
import io
import json
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.data import DataConfig, load_dataset, stream_report
from tests.tiers import examples

ROWS = {
    "good": {"query": "q", "response": "r"},
    "long": {"query": "q" * 400, "response": "r"},
    "media": {"query": "q", "response": "r", "images": "a.png"},
    "half": {"query": "q"},
    "other": {"value": "v"},
}
"""By the name of what they are, rows of conversations. In a table, rows have the columns of all rows."""
UNUSED = {"long": "too long", "media": "with media", "half": "malformed", "other": "malformed", "damaged": "malformed"}
COLUMNS = ("query", "response", "images", "value")


def jsonl(kinds):
    lines = [b"{damaged \xff" if kind == "damaged" else json.dumps(ROWS[kind]).encode() for kind in kinds]
    return b"\n".join(lines) + b"\n"


def comma(kinds, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, delimiter=delimiter)
    writer.writeheader()
    for kind in kinds:
        if kind == "damaged":
            out.write("a row with one cell\n")
        else:
            writer.writerow({name: ROWS[kind].get(name, "") for name in COLUMNS})
    return out.getvalue().encode()


def parquet(kinds):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[kind] for kind in kinds], arrow_schema()), out)
    return out.getvalue()


def arrow(kinds):
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, arrow_schema()) as writer:
        writer.write_table(pyarrow.Table.from_pylist([ROWS[kind] for kind in kinds], arrow_schema()))
    return out.getvalue()


def arrow_schema():
    return pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])


FORMATS = {
    "rows.jsonl": jsonl,
    "rows.jsonl.gz": lambda kinds: gzip.compress(jsonl(kinds)),
    "rows.json": lambda kinds: json.dumps([ROWS[kind] for kind in kinds]).encode(),
    "rows.csv": comma,
    "rows.tsv": lambda kinds: comma(kinds, "\t"),
    "rows.parquet": parquet,
    "rows.arrow": arrow,
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_any_format(byte_tokenizer, name):
    """In memory, each kind is counted under its reason, exactly. Of a stream, rows up to a cursor are used or have a reason, and
    each time that the file is read, its good rows are used."""
    possible = [*ROWS] if name[-3:] not in ("csv", "tsv") else ["good", "long", "media"]  # an empty cell is an empty answer
    possible += ["damaged"] * (name in ("rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.tsv"))

    @settings(deadline=None, max_examples=examples(30))
    @given(st.lists(st.sampled_from(possible), max_size=30), st.integers(1, 9))
    def holds(kinds, shuffle_rows):
        kinds = ["good", *kinds]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / name
            file.write_bytes(FORMATS[name](kinds))
            config = DataConfig("sft", (str(file),), 2, 100)
            report = load_dataset(config, byte_tokenizer).report
            assert report.num_rows == len(kinds) and report.num_used == kinds.count("good")
            assert report.unused == dict(Counter(UNUSED[kind] for kind in kinds if kind != "good"))
            stream = DataConfig("sft", (str(file),), 2, 100, stream=True, workers=0, shuffle_rows=shuffle_rows)
            batches = load_dataset(stream, byte_tokenizer)
            for step in range(12):
                batches.batch(step)
                found = stream_report(batches.cursor(step))
                assert found.num_rows == found.num_used + sum(found.unused.values())
            epochs = batches.cursor(11)["sources"][0]["epochs"]
            for count, in_file in ((found.num_rows, len(kinds)), (found.num_used, kinds.count("good"))):
                assert epochs * in_file <= count <= (epochs + 1) * in_file

    holds()
