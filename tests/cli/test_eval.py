"""`mpar eval`: results on the screen, as JSON, as a picture, and beside each other."""

import json

import pytest
import torch

from mpar.cli.main import main
from mpar.testing import assert_close
from tests.cli.conftest import run_mpar
from tests.cli.test_generate import folder

__all__ = ["folder"]


def test_sets_and_tasks(capsys, folder, tmp_path):
    """Losses and scores are printed, written and compared; bad rows are counted."""
    (tmp_path / "held.txt").write_text("a text of its own\n")
    rows = [{"prompt": "The sky is", "choices": [" blue", " red"], "answer": 0}, {"prompt": "x", "answer": "y", "max_tokens": 2}]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = ["kind=pt", f"sets=[{tmp_path}/held.txt]", f"tasks=[{tmp_path}/task.jsonl]"]
    assert main(["eval", f"path={folder}", *keys, f"out={tmp_path}/a.json", f"picture={tmp_path}/a.png"]) == 0
    said = capsys.readouterr()
    assert "1 of 1 rows used" in said.err
    assert all(word in said.out for word in ("loss", "perplexity", "accuracy", "accuracy_by_byte", "exact_match", "±"))
    results = json.loads((tmp_path / "a.json").read_text())
    assert results["sets"][f"{tmp_path}/held.txt"]["tokens"] == 18
    assert results["tasks"][f"{tmp_path}/task.jsonl"]["exact_match"]["questions"] == 1
    assert (tmp_path / "a.png").stat().st_size > 5000
    (tmp_path / "b.json").write_text((tmp_path / "a.json").read_text())
    assert main(["eval", f"compare=[{tmp_path}/a.json,{tmp_path}/b.json]"]) == 0
    table = capsys.readouterr().out
    assert "a.json" in table and "b.json" in table


@pytest.mark.full("processes that load torch")
@pytest.mark.parametrize("mesh", ["tp2", "fsdp2"])
def test_several_ranks_find_what_one_finds(folder, tmp_path, mesh):
    """The loss of a set of five documents, the scores of a task, and the answers to prompts."""
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps({"text": f"text {'x' * n}"}) for n in range(5)))
    rows = [{"prompt": "The sky is", "choices": [" blue", " red"], "answer": 0}, {"prompt": "x", "answer": "y", "max_tokens": 2}]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = [f"path={folder}", "kind=pt", "sets=[held.jsonl]", "tasks=[task.jsonl]"]
    found = {}
    for ranks in ("one", mesh):
        done = run_mpar(["eval", *keys, f"mesh={ranks}", f"out={ranks}.json"], tmp_path)
        assert done.returncode == 0, done.stderr
        said = run_mpar(["generate", f"path={folder}", f"mesh={ranks}", "prompts=task.jsonl", "max_new_tokens=9"], tmp_path)
        found[ranks] = json.loads((tmp_path / f"{ranks}.json").read_text()), said.stdout
    (one, one_said), (several, several_said) = found.values()
    assert several["tasks"] == one["tasks"] and several_said == one_said != ""
    losses = [torch.tensor(results["sets"]["held.jsonl"]["loss"]) for results in (several, one)]
    assert_close(*losses, name="loss")
    assert several["sets"]["held.jsonl"]["tokens"] == one["sets"]["held.jsonl"]["tokens"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "give either path"),
        (["path={folder}"], "there is nothing to evaluate on"),
        (["path={folder}", "sets=[x]", "compare=[a,b]"], "give either path"),
        (["path={folder}", "tasks=[/nowhere.jsonl]"], "cannot read the task /nowhere.jsonl"),
        (["path={folder}", "sets=[x]", "limit=1"], "num_fewshot, limit and chat are for tasks of harness"),
        (["path={folder}", "sets=[x]", "kind=rl"], "choose sft or pt"),
        (["path={folder}", "sets=[x]", "out=/nowhere/x.json"], "there is no folder /nowhere"),
        (["path={folder}", "sets=[x]", "picture=x.gif"], "a picture ends in"),
        (["compare=[/nowhere.json]"], "cannot compare /nowhere.json"),
    ],
)
def test_keys_that_do_not_fit_are_refused(capsys, folder, keys, message):
    """With what to give instead."""
    assert main(["eval", *(one.format(folder=folder) for one in keys)]) != 0
    assert message in capsys.readouterr().err
