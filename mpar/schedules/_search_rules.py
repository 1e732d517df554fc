"""The rules that list scheduling tries: first those of the named schedules, then rules close to the best of these."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mpar.schedules._search import Order, Problem, Run, run
from mpar.schedules._search_greedy import Rule, greedy

__all__ = ["first_rules", "search_rules"]

_NO_LIMIT = 1_000_000


def first_rules(problem: Problem) -> list[Rule]:
    """The first rules to try: all combinations of some limits, delays, preferences and ways to fuse."""
    ranks = len(problem.rank_stages)
    chunks = max(map(len, problem.rank_stages))
    limits = [
        (_NO_LIMIT,) * ranks,
        tuple((chunks - 1) * ranks + ranks - r for r in range(ranks)),
        tuple((chunks - 1) * ranks + 2 * (ranks - r) - 1 for r in range(ranks)),
        (chunks * ranks,) * ranks,
        (chunks * (2 * ranks - 1),) * ranks,
    ]
    delays = [(_NO_LIMIT,) * ranks, (0,) * ranks, tuple(range(ranks))]
    fuses = ["none", "first", "all"] if any(map(problem.fusing_helps, range(len(problem.place)))) else ["none"]
    preferences = [("deep", "deep"), ("group", "old")] if chunks > 1 else [("deep", "deep")]
    return [
        Rule(limit, delay, backward_first, forward, backward, fuse=fuse, group=ranks)
        for (forward, backward), backward_first, delay, fuse, limit in itertools.product(
            preferences, (True, False), delays, fuses, limits
        )
    ]


def search_rules(
    problem: Problem,
    rules: Sequence[Rule],
    num_actions: int,
    key: Callable[[Order, Run], tuple[float, float, int]],
    goal: float,
) -> tuple[list[Order], int]:
    """The orders of the best three rules, the best one last, and how many rules were tried.

    Tries the first of `rules`, then goes on from one of the best three to rules that differ from it in one part (hill climbing).
    num_actions: how many actions may be scheduled, over all orders that are tried.
    """
    num_rules = max(num_actions // problem.size, 4)
    tried = 0
    known: set[Rule] = set()
    scores: list[tuple[tuple[float, float, int], int, Rule, Order]] = []

    def attempt(rule: Rule) -> None:
        nonlocal tried
        known.add(rule)
        order = greedy(problem, rule)
        result = run(problem, order)
        assert result is not None
        scores.append((key(order, result), tried, rule, order))
        tried += 1

    for rule in rules[: max(num_rules // 2, 1)]:
        attempt(rule)
    exhausted: set[Rule] = set()
    while tried < num_rules:
        scores.sort(key=lambda score: score[:2])
        del scores[8:]
        if scores[0][0][0] <= goal * (1 + 1e-9) and scores[0][0][1] <= 1e-9 * goal:
            break
        open_rules = [score for score in scores[:3] if score[2] not in exhausted]
        if not open_rules:
            break
        start_key, _, rule, _ = open_rules[0]
        for near in _near(problem, rule):
            if near not in known and tried < num_rules:
                attempt(near)
                if scores[-1][0] < start_key:
                    break
        else:
            exhausted.add(rule)
    scores.sort(key=lambda score: score[:2])
    return [order for *_, order in scores[:3]][::-1], tried


def _near(problem: Problem, rule: Rule) -> Iterator[Rule]:
    """Rules that differ from `rule` in one part."""
    ranks, chunks = len(problem.rank_stages), max(map(len, problem.rank_stages))
    yield replace(rule, backward_first=not rule.backward_first)
    for patience in (1.0, 0.5, 0.0, 0.75):
        yield replace(rule, patience=patience)
    if any(map(problem.fusing_helps, range(len(problem.place)))):
        for fuse in ("none", "first", "all"):
            yield replace(rule, fuse=fuse)
    if chunks > 1:
        for preference in ("deep", "old", "shallow", "group"):
            yield replace(rule, forward=preference)
            yield replace(rule, backward=preference)
        for group in (ranks, 2 * ranks, max(ranks // 2, 1), ranks + 1):
            yield replace(rule, group=group)
    chunks_in_all = chunks * problem.count
    limit = tuple(min(number, chunks_in_all) for number in rule.limit)
    delay = tuple(min(number, chunks_in_all) for number in rule.delay)
    for change in (-1, 1, -2, 2, -4, 4):
        yield replace(rule, limit=tuple(max(number + change, 1) for number in limit))
        yield replace(rule, delay=tuple(max(number + change, 0) for number in delay))
    for rank in range(ranks):
        for change in (-1, 1, -3, 3):
            yield replace(rule, limit=(*limit[:rank], max(limit[rank] + change, 1), *limit[rank + 1 :]))
            yield replace(rule, delay=(*delay[:rank], max(delay[rank] + change, 0), *delay[rank + 1 :]))
