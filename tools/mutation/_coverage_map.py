"""The coverage map: which tests run a line, and how long each takes."""

import difflib
import gzip
import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from tools.mutation._mutants import Mutant

__all__ = ["Choice", "CoverageMap", "read_coverage"]


@dataclass(frozen=True)
class Choice:
    """The tests that judge a mutant, in order, the seconds that they took, and how many more tests run its line."""

    tests: tuple[str, ...]
    seconds: float
    num_left_out: int


@dataclass
class CoverageMap:
    """Seconds of each test that passed, and the tests that run each line of each file.

    key: names the tree that the map was made from, see `key_of`.
    """

    key: str
    seconds: dict[str, float]
    lines: dict[str, dict[int, frozenset[str]]]
    moved: dict[str, dict[int, int]] = field(default_factory=dict)

    def follow(self, path: str, then: str, now: str) -> None:
        """Note that a file has changed from `then` to `now` since the map was made; lines that are unchanged keep their tests."""
        matcher = difflib.SequenceMatcher(a=then.split("\n"), b=now.split("\n"), autojunk=False)
        self.moved[path] = {
            block.b + offset + 1: block.a + offset + 1 for block in matcher.get_matching_blocks() for offset in range(block.size)
        }

    def tests_of(self, mutant: Mutant) -> frozenset[str]:
        """The tests that run the line of a mutant.

        Of a line that runs on import the map knows only the first test that imported the file. So every test that runs some line
        of the file counts, or, if there is none, every test that runs some line of a file in the same folder.
        """
        of_file = self.lines.get(mutant.path, {})
        line = self.moved[mutant.path].get(mutant.line, 0) if mutant.path in self.moved else mutant.line
        if mutant.in_function:
            return of_file.get(line, frozenset())
        return _union([of_file]) or _union(lines for path, lines in self.lines.items() if _folder(path) == _folder(mutant.path))

    def choose(self, mutant: Mutant, budget_s: float) -> Choice:
        """The tests that judge a mutant, the fastest first, as many as take at most `budget_s` seconds together.

        After the tests that run its line come the other tests of their files: where tests share what the first of them made, such
        as a compiled program, the map knows only that first test.
        """
        direct = self.tests_of(mutant)
        files = {_file_of(test) for test in direct}
        beside = [test for test in self.seconds if test not in direct and _file_of(test) in files]
        chosen: list[str] = []
        total = 0.0
        for test in (*self._fastest_first(direct), *self._fastest_first(beside)):
            if chosen and total + self.seconds[test] > budget_s:
                continue
            chosen.append(test)
            total += self.seconds[test]
        return Choice(tuple(chosen), total, len(direct - set(chosen)))

    def _fastest_first(self, tests: Iterable[str]) -> list[str]:
        return sorted((test for test in tests if test in self.seconds), key=lambda test: (self.seconds[test], test))

    def save(self, path: Path) -> None:
        """Write the map to a file."""
        tests = sorted(self.seconds)
        number = {test: index for index, test in enumerate(tests)}
        lines = {
            file: {line: sorted(number[test] for test in names if test in number) for line, names in of_file.items()}
            for file, of_file in self.lines.items()
        }
        words = {"key": self.key, "tests": tests, "seconds": [self.seconds[test] for test in tests], "lines": lines}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_bytes(gzip.compress(json.dumps(words).encode()))
        draft.replace(path)

    @staticmethod
    def load(path: Path) -> "CoverageMap":
        """Read a map from a file."""
        words = json.loads(gzip.decompress(path.read_bytes()))
        tests = words["tests"]
        lines = {
            file: {int(line): frozenset(tests[index] for index in numbers) for line, numbers in of_file.items()}
            for file, of_file in words["lines"].items()
        }
        return CoverageMap(words["key"], dict(zip(tests, words["seconds"], strict=True)), lines)


def _union(files: Iterable[dict[int, frozenset[str]]]) -> frozenset[str]:
    return frozenset().union(*(tests for lines in files for tests in lines.values()))


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def read_coverage(key: str, data: Path, durations: Path, root: Path) -> CoverageMap:
    """The map made from a run of the tests in the folder `root`: from what pytest-cov wrote, and how long each test took.

    Tests that did not pass cannot judge a mutant, and are left out.
    """
    noted = json.loads(durations.read_text(encoding="utf-8"))
    seconds = {test: took for test, (took, passed) in noted.items() if passed}
    coverage = CoverageData(basename=str(data))
    coverage.read()
    lines: dict[str, dict[int, frozenset[str]]] = {}
    for file in sorted(coverage.measured_files()):
        path = Path(file).relative_to(root).as_posix()
        by_line = {line: _tests_among(seconds, contexts) for line, contexts in coverage.contexts_by_lineno(file).items()}
        lines[path] = {line: tests for line, tests in by_line.items() if tests}
    return CoverageMap(key, seconds, lines)


def _tests_among(known: Container[str], contexts: Iterable[str]) -> frozenset[str]:
    """The tests of contexts such as `tests/test_x.py::test_y|run`. What runs outside of tests has an empty context."""
    names = (re.sub(r"\|(setup|run|teardown)$", "", context) for context in contexts)
    return frozenset(name for name in names if name in known)
