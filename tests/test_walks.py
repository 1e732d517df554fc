"""The walks of docs/walks.md are true: every function is there, and each leads to the next as the page says."""

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path

import pytest

from mpar import Mesh, compile_step, models
from mpar.optim import AdamW

PAGE = (Path(__file__).parents[1] / "docs" / "walks.md").read_text(encoding="utf-8")
RELATIONS = "calls |returns to |makes |contains |runs the code of "
STEP = re.compile(rf"^(\d+)\. ({RELATIONS})?`([\w.]+):([\w.]+)`(?:, as `[\w.]*?(\w+)`)?", re.MULTILINE)
MOST = {"A parameter, from `mpar train` to its collective": 22, "A row, from jsonl to the loss": 16}
WALKS = {section.partition("\n")[0]: STEP.findall(section) for section in PAGE.split("\n## ")[1:]}
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def find(module: str, path: str) -> object:
    """The function or class of that name."""
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def called(function: object) -> set[str]:
    """The last part of the name of everything that a function calls, or hands to what it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.unparse(name).rpartition(".")[2] for call in calls for name in (call.func, *call.args)}


@pytest.mark.parametrize("title", MOST)
def test_walk_is_short_and_numbered(title):
    """A walk has few enough steps to be walked, numbered from 1."""
    assert [int(number) for number, *_ in WALKS[title]] == list(range(1, len(WALKS[title]) + 1))
    assert 10 <= len(WALKS[title]) <= MOST[title]


@pytest.mark.parametrize("title", MOST)
def test_each_step_leads_to_the_next(title):
    """What calls, returns to, makes or contains the next step does."""
    steps = WALKS[title]
    for (_, _, *before, _), (number, relation, *after, alias) in itertools.pairwise(steps):
        name, before_name = alias or after[1].rpartition(".")[2], before[1].rpartition(".")[2]
        match relation.strip():
            case "calls" | "makes":
                assert name in called(find(*before)), f"{number}: {':'.join(before)} does not call {name}"
            case "returns to":
                assert before_name in called(find(*after)), f"{number}: {':'.join(after)} does not call {before_name}"
            case "contains":
                assert after[1].rpartition(".")[0] == before[1], number
            case "runs the code of":
                assert after[1] == "HeadSegment.__call__" and "cross_entropy" in head_source()
            case _:
                raise AssertionError(f"{number} does not say how it follows from {before}")
        assert find(*after) is not None


def head_source() -> str:
    """The code that is made of the last segment of a small model."""
    program = compile_step(models.from_config(TINY), AdamW(1e-3), Mesh(dp=1), "ddp", (1, 8))
    return "".join(kind.source for name, kind in program.kinds.items() if name.startswith("head"))
