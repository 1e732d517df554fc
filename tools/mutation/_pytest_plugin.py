"""What pytest loads in a copy of the tree: it notes how long tests take, or runs chosen tests in a given order.

The runs import this file by itself (`-p _pytest_plugin`), so it uses nothing but pytest and the standard library.
"""

import json
from pathlib import Path

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add two options: where to note how long tests take, and which tests to run."""
    group = parser.getgroup("mutation")
    group.addoption("--note-durations", metavar="FILE", help="write {test: [seconds, whether it passed]} as JSON")
    group.addoption("--chosen-tests", metavar="FILE", help="run the tests listed in this JSON file, in its order")


def pytest_configure(config: pytest.Config) -> None:
    """Note durations in the one process that hears of every test; with pytest-xdist, the workers do not write."""
    path = config.getoption("--note-durations")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(Path(path)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the chosen tests, in the given order. A chosen test that no longer exists is left out."""
    path = config.getoption("--chosen-tests")
    if path:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in json.loads(Path(path).read_text(encoding="utf-8")) if name in found]


class _Durations:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, tuple[float, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, passed = self.tests.get(report.nodeid, (0.0, True))
        self.tests[report.nodeid] = (seconds + report.duration, passed and report.outcome == "passed")

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests, indent=0), encoding="utf-8")
