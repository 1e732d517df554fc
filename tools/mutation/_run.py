"""Try mutants, several at once, each in its own copy of the tree."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tools.mutation._copy import Copy, Ended
from tools.mutation._coverage_map import Choice
from tools.mutation._mutants import Mutant

__all__ = ["Outcome", "Verdict", "control", "try_mutants"]

NO_TESTS = 5  # what pytest returns if it found none of the tests
NUM_CONTROLS = 20


class Verdict(StrEnum):
    """What becomes of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    UNCOVERED = "no test covers"
    EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, and why.

    because:      the test that failed, the reason why a mutant is equivalent, or how the run ended otherwise.
    num_tests:    how many tests were chosen to judge it.
    num_left_out: how many tests that run its line were left out, because together they would have taken too long.
    """

    mutant: Mutant
    verdict: Verdict
    because: str = ""
    seconds: float = 0.0
    num_tests: int = 0
    num_left_out: int = 0


def control(copy: Copy, choices: Sequence[Choice], timeout_s: float, stop: threading.Event) -> str | None:
    """Run some of the tests in a copy without a mutant. Returns their output if they fail: they would then kill every mutant."""
    first = dict.fromkeys(test for choice in choices for test in choice.tests[:1])
    ended = copy.run_tests([*first][:NUM_CONTROLS], 3 * timeout_s, stop)
    return None if ended.code in (0, NO_TESTS) or stop.is_set() else ended.output


def try_mutants(
    copies: Sequence[Copy],
    choices: Mapping[Mutant, Choice],
    timeout_s: float,
    report: Callable[[Outcome], None],
    stop: threading.Event,
) -> None:
    """Try every mutant with the tests chosen for it. `report` is called with each outcome, in the thread of the caller.

    Once `stop` is set, or this is interrupted, the mutants that are being tried are given up.
    """
    todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | Exception | None] = queue.SimpleQueue()
    for mutant in choices:
        todo.put(mutant)

    def work(copy: Copy) -> None:
        try:
            while not stop.is_set():
                mutant = todo.get_nowait()
                outcome = _try(copy, mutant, choices[mutant], timeout_s, stop)
                if not stop.is_set():
                    done.put(outcome)
        except queue.Empty:
            done.put(None)
        except Exception as error:
            done.put(error)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    try:
        remaining = len(threads)
        while remaining:
            match done.get():
                case None:
                    remaining -= 1
                case Exception() as error:
                    raise error
                case outcome:
                    report(outcome)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _try(copy: Copy, mutant: Mutant, choice: Choice, timeout_s: float, stop: threading.Event) -> Outcome:
    if not choice.tests:
        return Outcome(mutant, Verdict.UNCOVERED)
    with copy.spoiled(mutant):
        ended = copy.run_tests(choice.tests, timeout_s, stop)
    verdict, because = _judge(ended)
    return Outcome(mutant, verdict, because, round(ended.seconds, 1), len(choice.tests), choice.num_left_out)


def _judge(ended: Ended) -> tuple[Verdict, str]:
    if ended.code is None:
        return Verdict.TIMED_OUT, ended.failed or ""
    if ended.code == 0:
        return Verdict.SURVIVED, ""
    if ended.code == NO_TESTS:
        return Verdict.UNCOVERED, "the tests of the coverage map are not there any more"
    lines = ended.output.strip().splitlines()
    return Verdict.KILLED, ended.failed or f"pytest returned {ended.code}: {lines[-1] if lines else ''}"
