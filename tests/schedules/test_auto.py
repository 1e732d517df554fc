"""The automatic scheduler: equal to exhaustive search where that is possible, never worse than a named one, within its cap."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from mpar.errors import ConfigError
from mpar.schedules import SCHEDULES, Costs, actions, auto, auto_actions, timeline

TINY = json.loads((Path(__file__).parent / "auto_instances.json").read_text())
STEP = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}


def costs_of(instance: dict[str, Any]) -> Costs:
    return Costs(**instance["costs"])


def least_makespan(instance: dict[str, Any], most: float) -> float | None:
    """The optimum by trying everything, or None if it is more than `most`.

    From every set of finished actions all that could come next are tried. Of two ways to the same set one is dropped if no time
    of it is before the other's: of ranks, links, and operands that wait. Ways that cannot end by `most` are dropped.
    """
    costs, place, count = instance["costs"], instance["placement"], instance["num_microbatches"]
    stages, ranks = len(place), 1 + max(place)
    times = {"F": costs["forward"], "I": costs["input"], "W": costs["weight"]}
    times["B"] = costs["backward"] or [i + w for i, w in zip(costs["input"], costs["weight"], strict=True)]
    least = {s: min(times["I"][s] + times["W"][s], times["B"][s]) for s in range(stages)}
    start = (tuple((0, 0, 0) for _ in place), tuple(0.0 for _ in range(ranks)), (), ())
    sets: list[dict[Any, list[Any]]] = [{} for _ in range(3 * count * stages + 2)]
    sets[0][start[0]] = [start[1:]]
    for size in range(3 * count * stages):
        for done, ways in sets[size].items():
            held = [0] * ranks
            left = [0.0] * ranks
            for s, (f, i, w) in enumerate(done):
                part = costs["weight_part"] or costs["activation"]
                held[place[s]] += (f - i) * costs["activation"][s] + (i - w) * part[s]
                left[place[s]] += (count - f) * times["F"][s] + (count - i) * least[s]
            for stage, (f, i, w) in enumerate(done):
                rank = place[stage]
                for kind, (a, b, c) in STEP.items():
                    if f + a > count or i + b > f or w + c > i + b or (kind == "B" and w != i):
                        continue
                    if kind == "F" and held[rank] + costs["activation"][stage] > instance["cap"][rank]:
                        continue
                    new = tuple((f + a, i + b, w + c) if s == stage else old for s, old in enumerate(done))
                    for free, sent, links in ways:
                        way = _append(instance, times, stage, kind, (f, i)[b], free, dict(sent), dict(links))
                        if way is None:
                            continue
                        spent = left[rank] - (times["F"][stage] if a else least[stage] if b else 0)
                        if way[0][rank] + spent <= most and max(way[0]) <= most:
                            _keep(sets[size + a + b + c].setdefault(new, []), way)
        sets[size].clear()
    return min((max(free) for ways in sets[3 * count * stages].values() for free, _, _ in ways), default=None)


def _append(instance, times, stage, kind, microbatch, free, sent, links):
    """Times after one more action; None if its operand is not made yet."""
    place, transfer = instance["placement"], instance["costs"]["transfer"]
    rank, begin = place[stage], free[place[stage]]
    before = stage - 1 if kind == "F" else stage + 1
    if kind != "W" and 0 <= before < len(place):
        name = "activation" if kind == "F" else "gradient"
        if (name, stage, microbatch) not in sent:
            return None
        begin = max(begin, sent.pop((name, stage, microbatch)))
    end = begin + times[kind][stage]
    after = stage + 1 if kind == "F" else stage - 1
    if kind != "W" and 0 <= after < len(place):
        arrival = end
        if place[after] != rank:
            arrival = max(end, links.get((rank, place[after]), 0)) + transfer[min(stage, after)]
            links[rank, place[after]] = arrival
        sent["activation" if kind == "F" else "gradient", after, microbatch] = arrival
    free = tuple(end if r == rank else old for r, old in enumerate(free))
    # a time before its reader is free again is as good as any other such time
    sent = tuple(sorted((key, max(time, free[place[key[1]]])) for key, time in sent.items()))
    links = tuple(sorted((pair, max(time, free[pair[0]])) for pair, time in links.items()))
    return free, sent, links


def _keep(ways, new):
    def numbers(way):
        return [*way[0], *(time for _, time in way[1]), *(time for _, time in way[2])]

    mine = numbers(new)
    if any(all(a <= b for a, b in zip(numbers(way), mine, strict=True)) for way in ways):
        return
    ways[:] = [way for way in ways if not all(a <= b for a, b in zip(mine, numbers(way), strict=True))]
    ways.append(new)


@pytest.mark.parametrize("instance", TINY, ids=lambda i: f"{i['placement']}x{i['num_microbatches']}".replace(" ", ""))
def test_equals_exhaustive_search(instance):
    """On small pipelines of all sorts of costs, caps and placements the makespan is the least there is, and known to be."""
    found = auto(
        costs_of(instance),
        placement=instance["placement"],
        num_microbatches=instance["num_microbatches"],
        cap_bytes=instance["cap"],
    )
    assert found.timeline.makespan == instance["makespan"] == found.bound and found.optimal
    assert all(peak <= cap for peak, cap in zip(found.timeline.peak_bytes, instance["cap"], strict=True))
    assert least_makespan(instance, most=instance["makespan"]) == instance["makespan"]


def place(ranks: int, chunks: int, shape: str) -> list[int]:
    return [s % ranks if shape == "loop" or s // ranks % 2 == 0 else ranks - 1 - s % ranks for s in range(ranks * chunks)]


def uneven(kind: str, stages: int) -> Costs:
    """Costs of a stage that is not like the others, of slow links, or of stages that all differ."""
    forward, backward, weight, transfer = [2.0] * stages, [2.0] * stages, [2.0] * stages, [0.1] * (stages - 1)
    if kind == "slow stage":
        for times in (forward, backward, weight):
            times[stages // 3] *= 2
    elif kind == "loss":
        forward[-1], backward[-1], weight[-1] = 3.0, 3.2, 2.8
    elif kind == "embedding":
        forward[0], weight[0] = 2.4, 3.4
    elif kind == "slow links":
        transfer = [1.0] * (stages - 1)
    elif kind == "mixed":
        forward = [1 + (7 * s % 5) * 0.5 for s in range(stages)]
        backward = [1 + (3 * s % 4) * 0.6 for s in range(stages)]
        weight = [1 + (5 * s % 7) * 0.3 for s in range(stages)]
        transfer = [0.1 * (s % 4) for s in range(stages - 1)]
    return Costs(forward, backward, weight, transfer=transfer, activation=[1] * stages)


def best_named(costs: Costs, placement: list[int], microbatches: int, cap: int) -> float:
    """The least makespan of the schedules by name that have this placement, all actions, and fit."""
    stages, ranks = len(placement), 1 + max(placement)
    spans = []
    for name in SCHEDULES:
        try:
            table = actions(name, num_ranks=ranks, num_chunks=stages // ranks, num_microbatches=microbatches)
        except ConfigError:
            continue
        ours = all(placement[action.stage] == rank for rank, own in enumerate(table) for action in own)
        if ours and name != "forward_only":
            run = timeline(table, costs)
            if max(run.peak_bytes) <= cap:
                spans.append(run.makespan)
    return min(spans, default=float("inf"))


SIZES = [(4, 1, 8, "loop", 4), (4, 1, 16, "loop", 6), (8, 1, 16, "loop", 8), (4, 2, 8, "v", 8), (4, 2, 16, "loop", 12)]
KINDS = ["slow stage", "loss", "embedding", "slow links", "mixed"]
# Makespans of the best schedule by name and of ours, to a tenth. Where they are equal, both are the lower bound.
FIGURES = {
    ((4, 1, 8, "loop", 4), "slow stage"): (98.5, 98.1),
    ((4, 1, 8, "loop", 4), "loss"): (78.3, 78.3),
    ((4, 1, 8, "loop", 4), "embedding"): (67.8, 67.8),
    ((4, 1, 8, "loop", 4), "slow links"): (66.0, 66.0),
    ((4, 1, 8, "loop", 4), "mixed"): (64.8, 62.3),
    ((4, 1, 16, "loop", 6), "slow stage"): (194.5, 194.1),
    ((4, 1, 16, "loop", 6), "loss"): (150.3, 150.3),
    ((4, 1, 16, "loop", 6), "embedding"): (130.2, 125.4),
    ((4, 1, 16, "loop", 6), "slow links"): (114.0, 106.0),
    ((4, 1, 16, "loop", 6), "mixed"): (123.2, 117.8),
    ((8, 1, 16, "loop", 8), "slow stage"): (197.2, 196.2),
    ((8, 1, 16, "loop", 8), "loss"): (158.7, 158.7),
    ((8, 1, 16, "loop", 8), "embedding"): (137.4, 137.4),
    ((8, 1, 16, "loop", 8), "slow links"): (138.0, 138.0),
    ((8, 1, 16, "loop", 8), "mixed"): (132.5, 130.0),
    ((4, 2, 8, "v", 8), "slow stage"): (148.2, 148.2),
    ((4, 2, 8, "v", 8), "loss"): (124.1, 120.6),
    ((4, 2, 8, "v", 8), "embedding"): (110.4, 110.4),
    ((4, 2, 8, "v", 8), "slow links"): (115.0, 112.0),
    ((4, 2, 8, "v", 8), "mixed"): (112.2, 109.0),
    ((4, 2, 16, "loop", 12), "slow stage"): (295.0, 292.2),
    ((4, 2, 16, "loop", 12), "loss"): (247.0, 246.3),
    ((4, 2, 16, "loop", 12), "embedding"): (228.0, 220.8),
    ((4, 2, 16, "loop", 12), "slow links"): (214.0, 201.0),
    ((4, 2, 16, "loop", 12), "mixed"): (227.0, 213.8),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_beats_named_schedules_or_none_can(size, kind):
    """On uneven pipelines the makespan is less than that of every named schedule that fits, unless that is the lower bound."""
    ranks, chunks, microbatches, shape, cap = size
    placement, costs = place(ranks, chunks, shape), uneven(kind, ranks * chunks)
    found = auto(costs, placement=placement, num_microbatches=microbatches, cap_bytes=cap)
    named = best_named(costs, placement, microbatches, cap)
    ours = found.timeline.makespan
    assert ours < named - 1e-9 or (found.optimal and ours == pytest.approx(found.bound, rel=1e-9) and ours <= named + 1e-9)
    assert max(found.timeline.peak_bytes) <= cap
    assert found.bound <= ours + 1e-9
    assert_whole(found.table, placement, microbatches)
    assert (round(named, 1), round(ours, 1)) == FIGURES[size, kind]


def assert_whole(table, placement, microbatches):
    """Everything once, on its rank; F, I or B, and W of every stage take microbatches in ascending order."""
    for rank, own in enumerate(table):
        for stage, at in enumerate(placement):
            for part in ("F", "IB", "WB"):
                taken = [action.microbatch for action in own if action.stage == stage and action.kind in part]
                assert taken == (list(range(microbatches)) if at == rank else [])


@pytest.mark.parametrize("shape, chunks", [("loop", 1), ("loop", 2), ("v", 2)])
@pytest.mark.parametrize("cap", [2, 3, 5, 8])
def test_every_cap_is_kept(shape, chunks, cap):
    """Also the least cap that is possible at all, of one microbatch: no search runs into a dead end, none exceeds it."""
    costs = uneven("mixed", 3 * chunks)
    found = auto(costs, placement=place(3, chunks, shape), num_microbatches=6, cap_bytes=cap, effort=0.2)
    assert max(found.timeline.peak_bytes) <= cap
    assert found.timeline == timeline(found.table, costs)
    assert_whole(found.table, place(3, chunks, shape), 6)


def test_is_deterministic():
    """The same input gives the same result, all of it; local search is among what was tried."""
    costs = uneven("mixed", 8)
    found = [auto(costs, placement=place(4, 2, "v"), num_microbatches=6, cap_bytes=7, effort=0.3) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].trials[-1].method == "local search"


def test_tables_that_are_given_compete():
    """With no effort to speak of, a better table that is given is what comes back."""
    costs, placement = uneven("mixed", 8), place(4, 2, "v")
    best = auto(costs, placement=placement, num_microbatches=6, cap_bytes=7)
    again = auto(costs, placement=placement, num_microbatches=6, cap_bytes=7, effort=1e-6, also={"mine": best.table})
    assert again.timeline.makespan == best.timeline.makespan and again.method == "mine"


def test_whole_backwards_where_they_are_cheaper():
    """If B takes less than I and W, and ranks have no gap to fill, the table has B."""
    costs = Costs([2.0], [2.0], [2.0], backward=[3.0])
    found = auto(costs, placement=[0], num_microbatches=3)
    assert found.timeline.makespan == 15 and found.optimal
    assert {action.kind for action in found.table[0]} == {"F", "B"}


def test_input_and_weight_gradients_stay_apart_only_where_that_is_sooner():
    """Where W follows its I, making B of both ends later; list scheduling, which starts from I and W, is what found the order."""
    costs = uneven("slow stage", 4)
    found = auto(costs, placement=place(4, 1, "loop"), num_microbatches=8, cap_bytes=4)
    assert found.method == "list scheduling"
    assert sum(action.kind == "B" for own in found.table for action in own) > 4
    for rank, own in enumerate(found.table):
        for at, (first, second) in enumerate(itertools.pairwise(own)):
            if first == second._replace(kind="I") and second.kind == "W":
                fused = [*own[:at], first._replace(kind="B"), *own[at + 2 :]]
                later = timeline([*found.table[:rank], fused, *found.table[rank + 1 :]], costs)
                assert later.makespan > found.timeline.makespan


def test_by_the_parameters_of_named_schedules():
    """Without costs all actions take one unit: the V of two ranks has no gap between first and last action."""
    table = auto_actions(num_ranks=2, num_chunks=2, num_microbatches=4, placement="v", cap_bytes=4)
    run = timeline(table, Costs.uniform(4))
    assert run.makespan == 25 and max(run.peak_bytes) <= 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cap_bytes": [5, 2]}, r"rank 1 needs 1 \+ 2 = 3 bytes for one microbatch alone, and has 2"),
        ({"cap_bytes": [5]}, "cap_bytes has 1 numbers, the placement has 2 ranks"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"placement": [0, 2, 2, 0]}, r"without a stage: \[1\]"),
        ({"placement": []}, "the placement has no stage"),
        ({"placement": [0, 1, 0]}, "costs.forward has 4 numbers, 3 stages need 3"),
        ({"effort": 0}, "effort is 0"),
        ({"costs": Costs([1.0] * 4, [-1.0] * 4, [1.0] * 4)}, "costs.input .* negative or not finite"),
        ({"costs": Costs([1.0] * 4, [1.0] * 4, [float("nan")] * 4)}, "costs.weight .* negative or not finite"),
        ({"costs": Costs([1.0] * 4, [1.0] * 4, [1.0] * 4), "cap_bytes": 9}, "cap_bytes needs costs.activation"),
        ({"costs": Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, activation=[1] * 4, weight_part=[1, 2, 1, 1])}, r"stages \[1\]"),
    ],
)
def test_impossible_requests_say_why(change, message):
    """The error has the arithmetic."""
    given = {
        "costs": Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, activation=[1, 1, 2, 1]),
        "placement": [0, 1, 1, 0],
        "num_microbatches": 4,
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        auto(given.pop("costs"), **given)
