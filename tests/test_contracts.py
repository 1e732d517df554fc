"""Rules about signatures, functions and classes, read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sampling import EVERY_CASE
from tests.test_layers import FILES, ids, module

pytestmark = pytest.mark.cases(EVERY_CASE)

MOST_ANY = 20
"""Public functions whose signatures may say Any, in the whole project: what takes or gives anything at all."""
MOST_LINES = 50
MOST_ATTRIBUTES = 12
KERNELS = "mpar/kernels/"  # jitted code has no functions to call that would cost nothing


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Every function and method of a file."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def says_any(function: ast.FunctionDef) -> bool:
    """Whether a signature has Any in it."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    hints = [*(arg.annotation for arg in every if arg is not None), function.returns]
    return any(isinstance(node, ast.Name) and node.id == "Any" for hint in hints if hint is not None for node in ast.walk(hint))


def test_signatures_say_what_they_take():
    """Any stands in few public signatures: those without a leading underscore, methods included."""
    found = [
        f"{module(path)}.{function.name}"
        for path in FILES
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if not function.name.startswith("_") and says_any(function)
    ]
    assert len(found) <= MOST_ANY, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_functions_are_short(path: Path):
    """A function can be held in one's head."""
    if ids(path).startswith(KERNELS):
        return
    long = [
        f"{ids(path)}:{function.lineno} {function.name}: {lines} lines"
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if (lines := function.end_lineno - function.lineno + 1) > MOST_LINES
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_objects_are_small(path: Path):
    """An object has few attributes, unless it is a record: a frozen dataclass or a struct, which only holds its parts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    large = [
        f"{ids(path)}:{node.lineno} {node.name}: {sorted(found)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not is_record(node) and len(found := attributes(node)) > MOST_ATTRIBUTES
    ]
    assert not large, "\n".join(large)


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a frozen dataclass or a struct."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return any(mark in ("struct", "tree.struct") or "frozen=True" in mark for mark in marks)


def attributes(node: ast.ClassDef) -> set[str]:
    """The fields of a class and what its methods set on `self`."""
    fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    return fields | {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    }
