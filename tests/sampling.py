"""Which cases of the parametrised tests the quick and the wide tier keep: a pure function of the cases and a seed."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

__all__ = ["CASES", "EVERY_CASE", "WIDE", "Case", "sample"]

CASES = 2  # how many cases of a function the quick tier keeps, unless the function's mark says another number
WIDE = 2  # how many times as many the wide tier keeps
EVERY_CASE = 10**6  # for the mark of functions whose cases take milliseconds: every tier runs them all


@dataclass(frozen=True)
class Case:
    """One collected test.

    `module` and `function` say where it stands; `values` says, for each parameter, which of its values this case takes. `most` is
    the number of cases of its function that the quick tier keeps; 0 leaves this case to the full tier.
    """

    module: str
    function: str
    label: str = ""
    values: Mapping[str, int] = field(default_factory=dict)
    most: int = CASES


def sample(cases: Sequence[Case], seed: int, *, wide: bool = False) -> list[bool]:
    """Whether the quick tier keeps each of `cases`; or the wide tier, which also has CASES of those left to the full tier.

    Of every function it keeps as many cases as the function allows, and prefers those that bring in values of parameters that no
    kept case has. Among equals the seed decides by a case's module and label alone, so functions of one module that have the same
    cases keep the same ones, and what is built for a case is built once.
    """
    kept = [False] * len(cases)
    order = sorted(range(len(cases)), key=lambda i: (cases[i].module, cases[i].function))
    for _, group in groupby(order, key=lambda i: (cases[i].module, cases[i].function)):
        ranked = sorted(group, key=lambda i: _rank(cases[i], seed))
        quick = [i for i in ranked if cases[i].most > 0]
        most = min((cases[i].most for i in quick), default=0)
        for i in _covering(ranked if wide else quick, cases, (most * WIDE or CASES) if wide else most):
            kept[i] = True
    return kept


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
    return hashlib.blake2b(f"{seed} {case.module} {case.label}".encode()).digest()
