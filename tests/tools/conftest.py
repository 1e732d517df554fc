"""A small repository for tools to work on; and where kernels run: on a GPU where there is one, else in Triton's interpreter."""

import subprocess
from pathlib import Path

import pytest
import torch

from tools.triton_interpreter import install

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    install()

SAMPLE = '''\
"""Arithmetic, of which tests know a part."""

from collections.abc import Sequence

LIMITS = (0, 9)


def clamp(x: int, low: int, high: int) -> int:
    """At most 9, at least 0."""
    return max(low, min(x, high))


def count_down(n: int) -> int:
    steps = 0
    while n > 0:
        n -= 1
        steps += 1
    return steps


def weigh(x: int) -> int:
    return x * 3


def unknown(xs: Sequence[int]) -> bool:
    return not sorted(xs)
'''

TESTS = """\
import pytest

from sample import LIMITS, clamp, count_down, weigh


@pytest.mark.parametrize("x", [-4, 4, 40])
def test_clamp(x):
    assert clamp(x, *LIMITS) == {-4: 0, 4: 4, 40: 9}[x]


def test_count_down():
    assert count_down(3) == 3


def test_weigh():
    assert weigh(0) == 0


def test_broken():
    assert weigh(1) == 4
"""


def git(root: Path, *words: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *name, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with the package `sample` and its tests, of which one fails."""
    root = tmp_path / "repository"
    (root / "sample").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "sample" / "__init__.py").write_text(SAMPLE, encoding="utf-8")
    (root / "tests" / "test_sample.py").write_text(TESTS, encoding="utf-8")
    (root / ".gitignore").write_text(".mutation/\n__pycache__/\n", encoding="utf-8")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n', encoding="utf-8")
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "sample")
    return root


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run."""
    return DEVICE
