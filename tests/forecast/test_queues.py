"""Times of queues that run at the same time: on paper, and laws that hold for every program."""

import itertools
import random
from types import SimpleNamespace

import pytest

from mpar.forecast import step_times
from mpar.ir import Instruction

KINDS = {
    "compute": SimpleNamespace(collectives=()),
    "talk": SimpleNamespace(collectives=(SimpleNamespace(axes=("dp",)),)),
    "copy": SimpleNamespace(collectives=()),
}


def program(instructions, num_values):
    """A program of one position; every value has a storage of its own."""
    values = [SimpleNamespace(storage=value) for value in range(num_values)]
    return SimpleNamespace(parts=[SimpleNamespace(instructions=instructions)], values=values, kinds=KINDS)


def line(queue, inputs, outputs, frees=()):
    kind = {"compute": "compute", "host": "copy"}.get(queue, "talk")
    return Instruction("forward" if queue == "compute" else queue, kind, inputs, outputs, frees, queue=queue)


def timed(instructions, seconds, **options):
    num_values = 1 + max(v for step in instructions for v in (*step.inputs, *step.outputs))
    return step_times(program(instructions, num_values), [seconds], {}, **options)


REDUCED = [
    line("compute", (0,), (1, 2)),  # 2 s: a gradient and what the next layer needs
    line("reduce", (1,), (3,)),  # 3 s
    line("compute", (2,), (4,)),  # 2 s, beside the reduction
    line("compute", (3, 4), (5,)),  # 1 s, needs both
]


def test_a_reduction_hides_behind_computation():
    """2 s, then 3 s of reduction beside 2 s of computation, then 1 s: 6 s, of which 1 s is exposed."""
    times = timed(REDUCED, [2.0, 3.0, 2.0, 1.0])
    assert times.start == [[0.0, 2.0, 2.0, 5.0]]
    assert times.end == [[2.0, 5.0, 4.0, 6.0]]
    assert (times.makespan, times.busy, times.exposed, times.bubble) == (6.0, [5.0], [{1: 1.0}], 0.0)
    assert times.span == [0.0]


def test_one_thing_at_a_time():
    """The same on hardware that overlaps nothing."""
    times = timed(REDUCED, [2.0, 3.0, 2.0, 1.0], overlaps=False)
    assert (times.makespan, times.busy, times.exposed) == (8.0, [8.0], [{}])


def test_memory_makes_computation_wait():
    """If the gradient is freed where it is reduced, computation may get its memory, so it waits for the reduction to end."""
    freed = [REDUCED[0], line("reduce", (1,), (3,), (1,)), *REDUCED[2:]]
    times = timed(freed, [2.0, 3.0, 2.0, 1.0])
    assert (times.makespan, times.exposed) == (8.0, [{1: 3.0}])


@pytest.mark.parametrize(
    ("seconds", "end"),
    [
        (2.0, 5.0),  # all of it beside the reduction of 3 s: half as fast again takes 3 s
        (1.0, 3.5),
        (4.0, 7.0),  # 3 s beside the reduction do the work of 2, 2 s are left
    ],
)
def test_computation_is_slower_beside_a_collective(seconds, end):
    """By half. What was computed before the reduction began took no longer."""
    times = timed(REDUCED, [2.0, 3.0, seconds, 1.0], contention=0.5)
    assert times.end[0][:3] == [2.0, 5.0, end]
    assert times.busy == [2.0 + (end - 2.0) + 1.0]


def test_copies_slow_nothing_down():
    steps = [line("host", (0,), (1,)), line("compute", (2,), (3,))]
    assert timed(steps, [3.0, 2.0], contention=0.5).end == [[3.0, 2.0]]


def test_queues_take_turns_at_the_links():
    """A gather that is ready at once goes in the pause before the reduction if it fits, else behind it; a copy needs no links."""
    steps = [
        line("compute", (0,), (1,)),  # 2 s
        line("reduce", (1,), (2,)),  # 3 s, from 2 s on
        line("gather", (3,), (4,)),
        line("host", (5,), (6,)),
    ]
    assert timed(steps, [2.0, 3.0, 1.5, 4.0]).start == [[0.0, 2.0, 0.0, 0.0]]
    assert timed(steps, [2.0, 3.0, 2.5, 4.0]).start == [[0.0, 2.0, 5.0, 0.0]]


def test_the_end_waits_for_all_queues():
    """A reduction behind the last computation is exposed as a whole, though nothing reads it in this step."""
    times = timed([line("compute", (0,), (1,)), line("reduce", (1,), (2,))], [1.0, 4.0])
    assert (times.makespan, times.exposed) == (5.0, [{1: 4.0}])


@pytest.mark.parametrize("block", range(4))
def test_laws(block):
    """No queue does two things at once, a step takes as long as it computes, waits and idles, and overlapping never takes longer
    than doing one thing after the other or less long than the busiest queue works."""
    for seed in range(100 * block, 100 * (block + 1)):
        rng = random.Random(seed)
        steps, alive, new = [], [0, 1, 2], 3
        for _ in range(rng.randint(1, 20)):
            inputs = tuple(rng.sample(alive, min(len(alive), rng.randint(1, 2))))
            frees = tuple(v for v in inputs if rng.random() < 0.3)
            steps.append(line(rng.choice(["compute", "compute", "gather", "reduce", "host"]), inputs, (new,), frees))
            alive, new = [v for v in (*alive, new) if v not in frees] or [new], new + 1
        seconds = [rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in steps]
        times = timed(steps, seconds)
        by_queue = {}
        for step, begin, end in zip(steps, times.start[0], times.end[0], strict=True):
            assert begin >= by_queue.get(step.queue, [(0.0, 0.0)])[-1][1], seed
            by_queue.setdefault(step.queue, []).append((begin, end))
        talking = sorted(span for queue in ("gather", "reduce") for span in by_queue.get(queue, ()) if span[1] > span[0])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(talking)), seed
        assert times.makespan == pytest.approx(times.busy[0] + sum(times.exposed[0].values())), seed
        assert max(sum(end - begin for begin, end in spans) for spans in by_queue.values()) <= times.makespan, seed
        assert times.makespan <= timed(steps, seconds, overlaps=False).makespan + 1e-9, seed
