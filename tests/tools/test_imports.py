"""Who may import whom outside the package: tests import bench and tools, bench imports tools, and tools import neither."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """(file, module) of every import in a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from ((str(path.relative_to(ROOT)), name) for name in names)


@pytest.mark.parametrize(
    ("folder", "refused"), [("bench", {"tests"}), ("tools", {"tests", "bench"}), ("mpar", {"tests", "bench", "tools"})]
)
def test_nothing_imports_what_is_above_it(folder, refused):
    """What is measured or checked works without tests, and tools work without benchmarks."""
    found = list(imported(folder))
    assert found and [each for each in found if each[1].split(".")[0] in refused] == []
