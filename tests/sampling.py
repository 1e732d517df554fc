"""Which tests the quick, the broad and the wide tier keep: a pure function of the tests, what they take, and a seed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

__all__ = ["BUDGET_S", "CASES", "EVERY_CASE", "WIDE", "Case", "quick_sample", "sample"]

BUDGET_S = 300.0  # of work on a slow core, which the quick tier spends on modules that take long
CASES = 2  # how many cases of a function the broad tier keeps, unless the function's mark says another number
WIDE = 2  # how many times as many the wide tier keeps
EVERY_CASE = 10**6  # for the mark of functions whose cases take milliseconds: every tier runs them all


@dataclass(frozen=True)
class Case:
    """One collected test.

    `module` and `function` say where it stands; `values` says, for each parameter, which of its values this case takes. `most` is
    the number of cases of its function that the broad tier keeps; 0 leaves this case to the full tier.
    """

    module: str
    function: str
    label: str = ""
    values: Mapping[str, int] = field(default_factory=dict)
    most: int = CASES


def sample(cases: Sequence[Case], seed: int, *, wide: bool = False) -> list[bool]:
    """Whether the broad tier keeps each of `cases`; or the wide tier, which also has CASES of those left to the full tier.

    Of every function it keeps as many cases as the function allows, and prefers those that bring in values of parameters that no
    kept case has. Among equals the seed decides by a case's module and label alone, so functions of one module that have the same
    cases keep the same ones, and what is built for a case is built once.
    """
    kept = [False] * len(cases)
    order = sorted(range(len(cases)), key=lambda i: (cases[i].module, cases[i].function))
    for _, group in groupby(order, key=lambda i: (cases[i].module, cases[i].function)):
        ranked = sorted(group, key=lambda i: _rank(cases[i], seed))
        broad = [i for i in ranked if cases[i].most > 0]
        most = min((cases[i].most for i in broad), default=0)
        for i in _covering(ranked if wide else broad, cases, (most * WIDE or CASES) if wide else most):
            kept[i] = True
    return kept


def quick_sample(cases: Sequence[Case], seed: int, seconds: Mapping[str, float]) -> list[bool]:
    """Whether the quick tier keeps each of `cases`: what the broad tier keeps of all modules that take little, and of as many
    that take long as there is time for, in an order that the seed decides. Functions of a module share what they build.

    seconds: what the cases of a module that the broad tier keeps take together, for modules that take long.
    """
    modules = sorted({case.module for case in cases} & seconds.keys(), key=lambda name: _digest(f"{seed} {name}"))
    kept, left_s = set(), BUDGET_S
    for name in modules:
        if seconds[name] <= left_s:
            kept.add(name)
            left_s -= seconds[name]
    broad = sample(cases, seed)
    return [keep and (case.module not in seconds or case.module in kept) for case, keep in zip(cases, broad, strict=True)]


def _covering(ranked: Iterable[int], cases: Sequence[Case], most: int) -> list[int]:
    """At most `most` of `ranked`: each time the first of those that bring in the most new values of parameters."""
    remaining, chosen, seen = list(ranked), [], set()
    while remaining and len(chosen) < most:
        best = max(remaining, key=lambda i: len(cases[i].values.items() - seen))  # the first of equals
        remaining.remove(best)
        chosen.append(best)
        seen |= cases[best].values.items()
    return chosen


def _rank(case: Case, seed: int) -> bytes:
    return _digest(f"{seed} {case.module} {case.label}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode()).digest()
