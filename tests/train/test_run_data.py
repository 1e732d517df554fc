"""The data of a run: which malformed rows it lists, and what its summary says."""

import json

import pytest

from mpar.cli._compose import compose_config
from mpar.train import TrainConfig, make_setup
from mpar.train._run_data import load_data
from tests.cli.conftest import SMALL

GOOD = '{"query": "q", "response": "a"}\n'


@pytest.fixture
def setup(tmp_path):
    """Four rows to train on and one malformed; one to evaluate on and one malformed."""
    (tmp_path / "a.jsonl").write_text(GOOD * 4 + "[1]\n")
    (tmp_path / "b.jsonl").write_text('{"query": "q"}\n' + GOOD)

    def make(*words):
        words = [*SMALL, "mesh=one", "strategy=ddp", "data=jsonl", f"data.sources=[{tmp_path}/a.jsonl]", *words]
        return make_setup(compose_config("train", TrainConfig, words)[0])

    return make


def test_malformed_rows_of_all_sources_are_listed(setup, tmp_path):
    """A line of JSON for each, also for data to evaluate on and for documents from the cache; ranks write nothing."""
    made, file = setup(f"evaluation.sources=[{tmp_path}/b.jsonl]"), tmp_path / "run" / "malformed.jsonl"
    for _ in range(2):
        data = load_data(made, tmp_path / "cache", file)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["source"], row["line"], row["text"]) for row in rows] == [
            (f"{tmp_path}/a.jsonl", 5, "[1]"), (f"{tmp_path}/b.jsonl", 1, '{"query": "q"}'),
        ]  # fmt: skip
        assert [row["reason"] for row in rows] == ["it is a JSON list, not an object", "no response"]
        assert f"malformed rows are listed in {file}" in data.summary and "data to evaluate on: 1 of 2 rows" in data.summary
        assert [path.name for path in file.parent.iterdir()] == ["malformed.jsonl"]
        file.unlink()
    assert load_data(made, tmp_path / "cache").malformed_file is None and not file.exists()


def test_list_of_an_earlier_run_goes_away(setup, tmp_path):
    """Once the rows are correct, no list says that they are not."""
    file = tmp_path / "malformed.jsonl"
    load_data(setup(), None, file)
    assert file.exists()
    (tmp_path / "a.jsonl").write_text(GOOD * 4)
    assert "malformed rows are listed" not in load_data(setup(), None, file).summary
    assert not file.exists()


def test_held_out_rows_are_counted(setup):
    """In the line of the data, which then describes both parts."""
    summary = load_data(setup("evaluation.fraction=0.5")).summary
    assert "; 2 rows held out" in summary and "data to evaluate on" not in summary
