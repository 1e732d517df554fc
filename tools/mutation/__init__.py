"""Mutation runs: change one line of a package in a copy of the tree, and see whether a test notices.

    python -m tools.mutation --mutants 60 --seed 0 --map-tests=--full

A mutant is one changed line. The tests that run the line, the fastest first, decide what becomes of it: one of them fails
(killed), they take too long (timed out), all of them pass (survived), or no test runs the line at all. A survivor is either a
law that no test states, or equivalent: the program does the same with the change. Equivalent ones are listed, with a reason
each, in tools/mutation/equivalent.yaml. Tests run in copies: the tree itself is never changed.

Which test runs which line is read from a coverage map. It takes one run of the tests, of the quick tier unless `--map-tests` says
another one, and is kept under .mutation/ by the commit that it was made at. Lines that only other processes run,
which tests start, are not in it.
"""

from tools.mutation._copy import Copy
from tools.mutation._coverage_map import Choice, CoverageMap
from tools.mutation._draw import draw
from tools.mutation._mutants import Mutant, changes_meaning, mutants_of
from tools.mutation._report import Report, read_equivalents, read_report
from tools.mutation._run import Outcome, Verdict, try_mutants

__all__ = [
    "Choice",
    "Copy",
    "CoverageMap",
    "Mutant",
    "Outcome",
    "Report",
    "Verdict",
    "changes_meaning",
    "draw",
    "mutants_of",
    "read_equivalents",
    "read_report",
    "try_mutants",
]
