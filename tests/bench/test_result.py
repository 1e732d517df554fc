"""Lines of results: what a file has is what is read, and a line that lacks what its reader needs says so."""

import json

import pytest

from bench._result import CASE, RESULTS, Origin, Result, ResultError, append_results, read_results
from bench.moe._layer import table as layer_table
from bench.parallel._table import table as parallel_table
from bench.schedules._gloo import table as schedules_table
from bench.spmd._table import table as spmd_table

FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_lines_of_every_file_are_read_and_written_as_they_are(path, tmp_path):
    """No key is lost, none is added, and every line says what was measured, when, of which commit, and by which command."""
    results = read_results(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result.values() for result in results] == lines and lines
    append_results(tmp_path / "again.jsonl", results)
    assert read_results(tmp_path / "again.jsonl") == results
    for result in results:
        assert result.case and result.figures and result.case.keys() <= CASE
        assert None not in (result.origin.date, result.origin.commit, result.origin.command)


@pytest.mark.parametrize(
    ("name", "table"),
    [("spmd", spmd_table), ("context", parallel_table), ("experts", parallel_table), ("moe", layer_table)],
)
def test_tables_are_made_of_old_lines(name, table):
    """Every line of the repository has what its table shows."""
    results = read_results(RESULTS / f"{name}.jsonl")
    shown = table(results)
    assert all(f"| {result.text('variant')} |" in shown and f"{result.number('median_ms'):.1f}" in shown for result in results)


def test_the_table_of_pipelines_is_made_of_old_lines():
    """The file has lines of other commands too, which have no median step."""
    results = [result for result in read_results(RESULTS / "schedules.jsonl") if result.has("median_ms")]
    assert len(schedules_table(results).splitlines()) == 2 + len(results) > 20


def test_a_line_of_another_time_is_read():
    """Facts that it does not state are None, and a key that nobody knows is a figure."""
    result = Result.of({"config": "nano", "median_ms": 1.5, "phase of the moon": "full", "date": "2026-01-01"})
    assert result.origin == Origin(date="2026-01-01") and result.case == {"config": "nano"}
    assert result.figures == {"median_ms": 1.5, "phase of the moon": "full"}
    assert read_results(RESULTS / "there is no such file.jsonl") == []


def test_what_a_line_lacks_is_named():
    """A reader that asks for what is not there, or is something else, gets an error with the line's case."""
    result = Result({"config": "nano"}, {"median_ms": "fast", "under_bar": True})
    with pytest.raises(ResultError, match="the line of config nano has no 'cpu_ms'"):
        result.number("cpu_ms")
    for wrong in ("median_ms", "under_bar"):
        with pytest.raises(ResultError, match=f"'{wrong}' of the line of config nano is not a number"):
            result.number(wrong)
    with pytest.raises(ResultError, match="is not a list of numbers"):
        result.numbers("median_ms")
    with pytest.raises(ResultError, match="is not a table"):
        result.table("median_ms")
    with pytest.raises(ResultError, match="is not words"):
        result.text("under_bar")


@pytest.mark.parametrize(
    ("case", "figures"), [({"median_ms": 1.0}, {}), ({}, {"config": "nano"}), ({}, {"commit": "abc"})], ids=str
)
def test_a_key_has_one_place(case, figures):
    """Otherwise a line would be read as another one than was written."""
    with pytest.raises(ResultError, match=next(iter(case | figures))):
        Result(case, figures)
