"""Result: one line of a file of results: what was measured, where, and the figures. Every benchmark writes and reads these."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

__all__ = ["CASE", "RESULTS", "Json", "Origin", "Result", "ResultError", "append_results", "read_results", "report_results"]

RESULTS = Path(__file__).resolve().parent / "results"

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

CASE = frozenset(
    {
        *("bench", "case", "variant", "config", "mesh", "ranks", "threads"),
        *("microbatches", "transport", "schedule", "chunks", "queues"),  # of pipelines
        *("tokens", "d", "mlp", "experts", "top_k"),  # of a layer of experts
        *("row", "number", "name", "dtype", "shape"),  # of the table of kernels
        "overrides",  # of a run of mpar train
        *("rate", "options"),  # of links, and of the program behind them
        *("prompt", "answers"),  # of requests, in tokens
    }
)
"""Keys of a line that say what was measured. Every other key, unless it is a fact of `Origin`, is a figure."""


class ResultError(Exception):
    """A line lacks something that its reader needs."""


@dataclass(frozen=True)
class Origin:
    """Facts that are needed to reproduce a number. A fact that a line does not state is None.

    command, date, commit: those of the run.
    copy, product: the speeds of a copy and of a product of matrices on this machine.
    run: when the run began, for runs whose lines belong together.
    All others, such as cpu, torch and python, are hardware and versions; some are only stated on a GPU.
    """

    date: str | None = None
    commit: str | None = None
    cpu: str | None = None
    gpu: str | None = None
    driver: str | None = None
    clocks: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    python: str | None = None
    transformers: str | None = None
    liger: str | None = None
    copy: str | None = None
    product: str | None = None
    command: str | None = None
    run: str | None = None

    def stated(self) -> dict[str, str]:
        """The facts that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


FACTS = frozenset(each.name for each in dataclasses.fields(Origin))


@dataclass(frozen=True)
class Result:
    """A line: `case` has the keys of CASE, `figures` the others. In a file they and the facts of `origin` stand side by side."""

    case: Mapping[str, Json]
    figures: Mapping[str, Json]
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        wrong = sorted({*(self.case.keys() - CASE), *(self.figures.keys() & (CASE | FACTS))})
        if wrong:
            raise ResultError(f"these keys are not where a line of results has them: {', '.join(wrong)}")

    @classmethod
    def of(cls, values: Mapping[str, Json], origin: Origin | None = None) -> "Result":
        """The result that has all these values of a line. Facts that `origin` states take precedence over those in `values`."""
        stated = {key: str(value) for key, value in values.items() if key in FACTS and value is not None}
        case = {key: value for key, value in values.items() if key in CASE}
        figures = {key: value for key, value in values.items() if key not in CASE | FACTS}
        return cls(case, figures, Origin(**stated | (origin or Origin()).stated()))

    def values(self) -> dict[str, Json]:
        """All values, as they stand in a file."""
        return {**self.case, **self.figures, **self.origin.stated()}

    def has(self, key: str) -> bool:
        """Whether the case or the figures have `key`. Lines of other benchmarks, and older lines, may lack it."""
        return key in self.case or key in self.figures

    def text(self, key: str) -> str:
        """The words under `key`. Raises ResultError if there are none."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self._is_not(key, "words")
        return value

    def number(self, key: str) -> float:
        """The number under `key`. Raises ResultError if there is none."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._is_not(key, "a number")
        return value

    def numbers(self, key: str) -> list[float]:
        """The numbers under `key`. Raises ResultError if there are none."""
        value = self._value(key)
        if not isinstance(value, list | tuple) or not all(isinstance(x, int | float) for x in value):
            raise self._is_not(key, "a list of numbers")
        return [x for x in value if isinstance(x, int | float)]

    def table(self, key: str) -> Mapping[str, Json]:
        """The values by name under `key`. Raises ResultError if there are none."""
        value = self._value(key)
        if not isinstance(value, Mapping):
            raise self._is_not(key, "a table")
        return value

    def _value(self, key: str) -> Json:
        if not self.has(key):
            raise ResultError(f"the line of {self._named()} has no {key!r}")
        return self.case[key] if key in self.case else self.figures[key]

    def _is_not(self, key: str, expected: str) -> ResultError:
        return ResultError(f"{key!r} of the line of {self._named()} is not {expected}: {self._value(key)!r}")

    def _named(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.case.items()) or "no case"


def append_results(path: Path, results: Iterable[Result]) -> None:
    """Add lines to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(result.values()) + "\n" for result in results)


def report_results(path: Path, results: Iterable[Result]) -> None:
    """Add lines to a file, and write what was measured on the screen."""
    found = list(results)
    append_results(path, found)
    for result in found:
        sys.stdout.write(json.dumps(result.case | result.figures) + "\n")
        sys.stdout.flush()


def read_results(path: Path) -> list[Result]:
    """The lines of a file; none if there is no file."""
    if not path.exists():
        return []
    return [Result.of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
