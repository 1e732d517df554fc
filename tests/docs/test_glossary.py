"""docs/glossary.md: its words have one meaning in the public names of mpar, and each word that it refuses is in none."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import EVERY_CASE
from tests.test_layers import FILES, ids

pytestmark = pytest.mark.cases(EVERY_CASE)

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
ONE_MEANING = {
    "step": "mpar/(program|train|data|checkpoint|optim|optimizer|forecast|proof|cli|infer|serve|rollouts)"
    "|mpar/ops/(_adamw|_eigenbasis)|mpar/models/layers/_drop",
    "schedule": "mpar/(schedules|compiler|ir|program|train|cli)",
    "pass": "mpar/(compiler|sharding)",
    "position": "mpar/(schedules|compiler|ir|program|proof|forecast|runtime)"
    "|mpar/(ops|models|data|arrange|sharding|rollouts|tasks)",
    "stage": "mpar/(schedules|compiler|ir|program|proof|forecast|cli|checkpoint)",
    "piece": "mpar/(compiler|ir|proof|runtime|program|data|sharding)",
    "microbatch": "mpar/(schedules|compiler|ir|program|proof|runtime|train|cli|forecast)|mpar/(chain|models)",
}
"""Words that are used in many rooms, and where, as a pattern of paths: elsewhere they would mean something else."""
IN_NO_NAME = ("left", "own", "rest", "whole", "most", "what", "iteration", "gpu", "sync")
"""Words that say too little, or stand for a word of the glossary."""
ALLOWED = {
    "own_choices": "choices in a folder of the user's own",
    "OwnSource": "the same folder, as Hydra knows it",
    "own_experts_p": "the experts of a rank, among all",
    "sync": "of a file with the disk, as the operating system calls it",
    "left": "an operand of a sum, beside the right one",
    "max_iterations": "of Sinkhorn's iteration",
    "most": "how many lines are shown",
    "WHOLE": "the whole of a tensor, where parts of it are meant elsewhere",
}


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Functions, their parameters, classes, their fields and methods, and constants, none of which begins with an underscore."""
    for node in body:
        match node:
            case ast.FunctionDef() if not node.name.startswith("_"):
                yield node.name
                yield from (arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))
            case ast.ClassDef() if not node.name.startswith("_"):
                yield node.name
                yield from public_names(node.body)
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                yield name
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name) and target.id[0] != "_")


def words(name: str) -> set[str]:
    """The words of a name, without the s of a plural."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return {*parts, *(part.removesuffix("s") for part in parts)}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_words_have_one_meaning(path):
    """A word of the glossary is in public names of the rooms where it means that; a word that it refuses is in none."""
    if ids(path).startswith("mpar/kernels/"):
        return  # tiles have stages, steps and rests of their own
    wrong = []
    for name in public_names(ast.parse(path.read_text(encoding="utf-8")).body):
        found = words(name)
        wrong += [f"{name}: no name says {word!r}" for word in IN_NO_NAME if word in found and name not in ALLOWED]
        wrong += [f"{name}: {word!r} means something else" for word, rooms in ONE_MEANING.items()
                  if word in found and not re.match(rooms, ids(path))]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_glossary_has_these_words():
    """What is held to one meaning is explained, and in the table of the refused words where it is one."""
    meanings = re.findall(r"^\| ([^|]+) \| ", GLOSSARY, re.MULTILINE)
    explained = {word.strip(" `") for entry in meanings for word in entry.split(",")}
    assert ONE_MEANING.keys() <= explained
    for word in ("left", "own", "whole", "sync"):
        assert re.search(rf"\b{word}\b", GLOSSARY), word
