"""Local search alone: what it gives back is the best order that it has seen."""

import math

import pytest

from mpar.schedules import Costs, actions
from mpar.schedules._search import from_table, problem_of, run
from mpar.schedules._search_local import improve


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slow", [0, 2])
def test_more_moves_never_give_a_worse_order(slow, seed):
    """One seed makes the same moves, however many: with more of them the makespan, then the span bubble, never grows."""
    times = [3.0 if stage == slow else 2.0 for stage in range(4)]
    problem = problem_of(Costs(times, times, times, transfer=[0.5] * 3), range(4), 8, [math.inf] * 4)
    order = from_table(actions("zb_h1", num_ranks=4, num_microbatches=8))
    best = run(problem, order)
    for runs in range(0, 400, 20):
        found = run(problem, improve(problem, order, runs=runs, seed=seed, goal=0.0))
        assert (found.makespan, found.span_bubble) <= (best.makespan, best.span_bubble)
        best = found
    assert best.makespan < run(problem, order).makespan
