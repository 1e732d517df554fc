"""The timeline, against the recurrence of times in its plain form, and closed forms."""

import random

import pytest

from mpar.errors import ConfigError, ProgramError
from mpar.schedules import Action, Costs, actions, timeline


def naive(table, costs):
    """Sweep over all ranks until no time changes: an action starts when the one before it and its operands are there."""
    place = {(action.stage, action.microbatch): rank for rank, own in enumerate(table) for action in own if action.kind == "F"}
    top = max(stage for stage, _ in place)
    start = {action: 0.0 for own in table for action in own}
    end = {}
    while True:
        new, arrival = {}, {}
        for rank, own in enumerate(table):  # channels: transfers to one rank follow each other
            free = {}
            for action in own:
                stage, kind, m = action
                far = stage + 1 if kind == "F" else stage - 1
                if kind == "W" or not 0 <= far <= top or place[far, m] == rank:
                    continue
                begin = max(end.get(action, 0.0), free.get(place[far, m], 0.0))
                arrival[action] = free[place[far, m]] = begin + costs.transfer[min(stage, far)]
        for rank, own in enumerate(table):
            now = 0.0
            for action in own:
                stage, kind, m = action
                needs = [Action(stage - 1, "F", m)] if kind == "F" else [Action(stage + 1, k, m) for k in "BI"]
                for need in needs if kind != "W" else ():
                    if need in start:
                        now = max(now, end.get(need, 0.0) if place[need.stage, m] == rank else arrival[need])
                new[action] = now
                now += costs.of(action)
        new_end = {action: time + costs.of(action) for action, time in new.items()}
        if (new, new_end) == (start, end):
            return [[start[action] for action in own] for own in table], [[end[action] for action in own] for own in table]
        start, end = new, new_end


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb1p", "zbv", "dual_pipe", "forward_only"])
def test_times(name, seed):
    """Starts and ends are the smallest that order, operands and channels allow, for uneven times."""
    rng = random.Random(seed)
    table = actions(name, num_ranks=4 if name == "dual_pipe" else 3, num_microbatches=8 if name == "dual_pipe" else 6)
    count = 1 + max(action.stage for own in table for action in own)
    transfer = [rng.choice((0.0, 0.3, 2.0)) for _ in range(count - 1)]
    costs = Costs(*([rng.uniform(0.5, 1.5) for _ in range(count)] for _ in range(3)), transfer=transfer)
    found = timeline(table, costs)
    start, end = naive(table, costs)
    assert found.start == [pytest.approx(own) for own in start]
    assert found.end == [pytest.approx(own) for own in end]
    assert found.busy == pytest.approx([sum(costs.of(action) for action in own) for own in table])


def test_bubble_and_memory():
    """1F1B on four ranks: bubble (P - 1)(F + B), P - r microbatches in flight; seen from its own first and last action, less."""
    found = timeline(actions("one_f_one_b", num_ranks=4, num_microbatches=8), Costs.uniform(4, 1, 1, 2))
    assert found.bubble == 3 * 4 and found.makespan == 8 * 4 + 12
    assert found.peak_bytes == [4, 3, 2, 1]
    assert found.span_bubble == 3 * 4


def test_memory_of_parts():
    """I gives back all but the weight part, W the rest."""
    table = [[Action(0, "F", 0), Action(0, "I", 0), Action(0, "F", 1), Action(0, "B", 1), Action(0, "W", 0)]]
    costs = Costs([1], [1], [1], activation=[10], weight_part=[4])
    assert timeline(table, costs).peak_bytes == [14]


def test_backward_time_of_its_own():
    """B takes what `backward` says, I + W without it."""
    table = [[Action(0, "F", 0), Action(0, "B", 0)]]
    assert timeline(table, Costs([1], [2], [3])).makespan == 6
    assert timeline(table, Costs([1], [2], [3], backward=[4])).makespan == 5


def test_stuck():
    """Ranks that wait for each other are told with their actions."""
    table = [[Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1)], [Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ProgramError, match="rank 0 at 0B0, rank 1 at 1F1"):
        timeline(table, Costs.uniform(2))


def test_part_of_a_table():
    """A table that stops early has times, too."""
    assert timeline([[Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], Costs.uniform(2)).end == [[1], [2, 4]]


@pytest.mark.parametrize("action", [Action(-1, "F", 0), Action(0, "F", -1), Action(0, "G", 0)], ids=str)
def test_refuses_what_is_no_action(action):
    """Negative numbers and unknown kinds."""
    with pytest.raises(ProgramError, match=str(action)):
        timeline([[action]], Costs.uniform(1))


def test_refuses_too_few_costs():
    """Every stage has costs, every boundary a transfer if any has."""
    table = actions("gpipe", num_ranks=3, num_microbatches=2)
    with pytest.raises(ConfigError, match="3 stages"):
        timeline(table, Costs.uniform(2))
    with pytest.raises(ConfigError, match="2 transfers"):
        timeline(table, Costs([1] * 3, [1] * 3, [1] * 3, transfer=[1]))
