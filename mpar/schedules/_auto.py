"""Searches the best order for a pipeline, given the costs of its actions and the memory of its ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpar.errors import ConfigError
from mpar.schedules._action import Action, Actions
from mpar.schedules._names import SCHEDULES
from mpar.schedules._search import Order, Problem, Run, fits, from_table, fused, problem_of, run, to_table
from mpar.schedules._search_bound import bounds_of
from mpar.schedules._search_exact import exact
from mpar.schedules._search_local import improve
from mpar.schedules._search_rules import first_rules, search_rules
from mpar.schedules._timeline import Costs, Timeline, timeline

__all__ = ["Auto", "Trial", "auto", "auto_actions"]


@dataclass(frozen=True)
class Trial:
    """One method of the search, the best makespan it found (None: no order that fits), and how many orders or states it tried."""

    method: str
    makespan: float | None
    num_orders: int


@dataclass(frozen=True)
class Auto:
    """The result of the search.

    table:   for each rank its actions.
    bound:   a time before which no order can end.
    optimal: whether it is proven that no order ends before this one.
    method:  the trial that found this order.
    trials:  all trials, in order.
    """

    table: list[list[Action]]
    timeline: Timeline
    bound: float
    optimal: bool
    method: str
    trials: tuple[Trial, ...]

    @property
    def gap(self) -> float:
        """By how much the makespan is above the bound, as a share of the bound. No better order can gain more."""
        return self.timeline.makespan / self.bound - 1 if self.bound else 0.0


def auto(
    costs: Costs,
    *,
    placement: Sequence[int],
    num_microbatches: int,
    cap_bytes: Sequence[int] | int | None = None,
    also: Mapping[str, Actions] | None = None,
    effort: float = 1.0,
    seed: int = 0,
) -> Auto:
    """Search the order with the least makespan; of equal ones the least span bubble decides, then the least peak of bytes.

    In every stage F, I or B, and W each take the microbatches in ascending order. The search tries, in turn, the named schedules,
    list scheduling by many rules, an exact search if there are few actions, and beam search and local search from the best order
    so far. The same input always gives the same result, because work is limited by counts and not by clocks.

    placement: for each stage its rank.
    cap_bytes: bytes for activations, as `Costs.activation` counts them, of each rank, or one number for every rank.
    also:      more tables, by name, that compete with those of SCHEDULES. Tables with another placement or above the cap are
               ignored; microbatches are renumbered to ascend.
    effort:    by what factor the search does more or less work than usual.

    Raises ConfigError if costs, placement and sizes disagree, or if no order can fit the cap: even a single microbatch holds, on
    every rank, the activations of all stages there.
    """
    if not effort > 0:
        raise ConfigError(f"auto: effort is {effort}, needs to be more than 0")
    problem = _problem(costs, placement, num_microbatches, cap_bytes)
    bounds = bounds_of(problem)
    search = _Search(problem, bounds.makespan)
    search.offer_tables((*_named(problem), *(also or {}).items()))
    num_actions = max(int(effort * _ACTIONS), 1)
    if not (search.done and search.without_bubble):  # even at the bound: it is cheap, and may lower span bubble and bytes
        search.offer("list scheduling", *search_rules(problem, first_rules(problem), num_actions, search.key, bounds.makespan))
    if not search.done and problem.size <= _FEW:
        outcome = exact(problem, bounds, search.makespan, nodes=int(effort * _NODES))
        search.offer("exact", [outcome.order] if outcome.order else [], outcome.nodes)
        search.proven = outcome.proven
    if not search.done and problem.size <= _MANY:
        width = max(int(effort * _NODES) // (2 * problem.size), 1)
        outcome = exact(problem, bounds, search.makespan, nodes=int(effort * _NODES), width=width)
        search.offer("beam", [outcome.order] if outcome.order else [], outcome.nodes)
    if not search.done:
        runs = min(max(int(effort * _MOVES) // problem.size, 20), 20_000)
        found = improve(problem, search.order, runs=runs, seed=seed, goal=bounds.makespan)
        search.offer("local search", [found], runs)
    return search.result()


_OPTIONS: dict[str, list[dict[str, object]]] = {
    "one_f_one_b": [{}, {"extra_warmup": 1}],
}
_ACTIONS = 330_000  # how many actions list scheduling may place, over all orders that it tries
_MOVES = 8_000_000  # how many actions local search may run, over all orders that it tries
_NODES = 40_000  # how many states exact search or beam search may open
_FEW = 100  # with more actions than this, an exact search has no chance within _NODES
_MANY = 400  # with more actions than this, beam search is too narrow to be of use


class _Search:
    """The best order so far, and the trials that were made."""

    def __init__(self, problem: Problem, bound: float) -> None:
        self.problem, self.bound = problem, bound
        self.best: tuple[tuple[float, float, int], Order, str] | None = None
        self.trials: list[Trial] = []
        self.proven = False

    def key(self, order: Order, result: Run) -> tuple[float, float, int]:
        """What the search minimises. Times are rounded, so that the order in which they are summed does not decide."""
        digits = 9 - math.ceil(math.log10(max(self.bound, 1e-300)))
        peak = max(_peaks(self.problem, order))
        return round(result.makespan, digits), round(result.span_bubble, digits), peak

    def offer_tables(self, tables: Iterable[tuple[str, Actions]]) -> None:
        """Note each table of this problem as a trial; the trial of a table above the cap has no order."""
        for name, table in tables:
            order = _as_order(self.problem, table)
            if order is not None:
                fitting = all(fits(self.problem, rank, codes) for rank, codes in enumerate(order))
                self.offer(name, [order] if fitting else [], 1)

    def offer(self, method: str, orders: Sequence[Order], num_orders: int) -> None:
        """Note a trial, and keep the best of its orders if it is the best so far."""
        makespan = None
        for order in orders:
            result = run(self.problem, order)
            assert result is not None and all(fits(self.problem, rank, codes) for rank, codes in enumerate(order))
            makespan = result.makespan if makespan is None else min(makespan, result.makespan)
            key = self.key(order, result)
            if self.best is None or key < self.best[0]:
                self.best = key, order, method
        self.trials.append(Trial(method, makespan, num_orders))

    @property
    def order(self) -> Order:
        assert self.best is not None
        return self.best[1]

    @property
    def makespan(self) -> float:
        assert self.best is not None
        result = run(self.problem, self.best[1])
        assert result is not None
        return result.makespan

    @property
    def without_bubble(self) -> bool:
        return self.best is not None and self.best[0][1] <= 1e-9 * self.bound

    @property
    def done(self) -> bool:
        """Whether no order can end sooner. The span bubble may still be lowered, which only local search tries."""
        return self.best is not None and (self.proven or self.makespan <= self.bound * (1 + 1e-9))

    def result(self) -> Auto:
        assert self.best is not None
        order = fused(self.problem, self.order)
        table = to_table(order)
        best_timeline = timeline(table, self.problem.costs)
        optimal = self.done or self.proven
        assert self.bound <= best_timeline.makespan * (1 + 1e-9)
        bound = best_timeline.makespan if self.proven else min(self.bound, best_timeline.makespan)
        return Auto(table, best_timeline, bound, optimal, self.best[2], tuple(self.trials))


def _peaks(problem: Problem, order: Order) -> list[int]:
    peaks = []
    for codes in order:
        live = peak = 0
        for code in codes:
            stage, kind = code >> 2, code & 3
            activation, deferred_bytes = problem.activation[stage], problem.deferred_bytes[stage]
            live += (activation, -activation, deferred_bytes - activation, -deferred_bytes)[kind]
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _named(problem: Problem) -> Iterator[tuple[str, Actions]]:
    """The tables of all named schedules that exist for these sizes, some of them with options."""
    stages, ranks = len(problem.place), len(problem.rank_stages)
    if stages % ranks:
        return
    for name, schedule in SCHEDULES.items():
        if schedule.allowed_chunks is not None and stages // ranks not in schedule.allowed_chunks:
            continue
        for options in _OPTIONS.get(name, [{}]):
            try:
                table = schedule.table(ranks, stages // ranks, problem.count, options)
            except ConfigError:  # this schedule refuses these sizes
                continue
            yield name + "".join(f" {option}={value}" for option, value in options.items()), table


def auto_actions(
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    placement: str | Sequence[int] = "loop",
    cap_bytes: Sequence[int] | int | None = None,
) -> list[list[Action]]:
    """The table of `auto`, with the parameters that `actions` has for named schedules.

    costs:     None stands for `Costs.uniform`, so that cap_bytes counts microbatches times chunks in flight.
    placement: "loop": chunk c of rank r is stage c * num_ranks + r. "v": the same, with ranks in descending order in every other
               chunk. Or a list with the rank of each stage.
    """
    stages = num_ranks * num_chunks
    if isinstance(placement, str):
        if placement not in ("loop", "v"):
            raise ConfigError(f"schedule auto: placement {placement!r} is not 'loop', 'v', or a list of the ranks of all stages")
        is_reversed = [placement == "v" and s // num_ranks % 2 == 1 for s in range(stages)]
        places = [num_ranks - 1 - s % num_ranks if reverse else s % num_ranks for s, reverse in enumerate(is_reversed)]
    else:
        places = list(placement)
        if len(places) != stages or not set(places) <= set(range(num_ranks)):
            raise ConfigError(
                f"schedule auto: placement {places} does not name a rank for each of {stages} stages "
                f"({num_ranks} ranks of {num_chunks} chunks)"
            )
    if costs is None:
        costs = Costs.uniform(stages)
    return auto(costs, placement=places, num_microbatches=num_microbatches, cap_bytes=cap_bytes).table


def _as_order(problem: Problem, table: Actions) -> Order | None:
    """A table as an order of this problem. None if it is of another problem, or cannot run with ascending microbatches."""
    if len(table) != len(problem.rank_stages):
        return None
    counts: dict[tuple[int, str], int] = {}
    for rank, actions in enumerate(table):
        for stage, kind, _ in actions:
            if stage >= len(problem.place) or problem.place[stage] != rank:
                return None
            for part in "IW" if kind == "B" else kind:
                counts[stage, part] = counts.get((stage, part), 0) + 1
    if any(counts.get((stage, part)) != problem.count for stage in range(len(problem.place)) for part in "FIW"):
        return None
    order = from_table(table)
    return None if run(problem, order) is None else order


def _problem(costs: Costs, placement: Sequence[int], num_microbatches: int, cap_bytes: Sequence[int] | int | None) -> Problem:
    """The problem to solve. Raises ConfigError, which lists everything that is wrong with the arguments."""
    stages, ranks = len(placement), 1 + max(placement, default=-1)
    caps: list[float] = [math.inf] * ranks
    if cap_bytes is not None:
        caps = list(cap_bytes) if isinstance(cap_bytes, Sequence) else [cap_bytes] * ranks
    wrong = _size_problems(placement, num_microbatches) + _cost_problems(costs, stages)
    if cap_bytes is not None and len(caps) != ranks:
        wrong.append(f"cap_bytes has {len(caps)} numbers, the placement has {ranks} ranks")
    if cap_bytes is not None and not costs.activation:
        wrong.append("cap_bytes needs costs.activation: without it no order holds any bytes")
    if not wrong and costs.activation:
        for rank, cap in enumerate(caps):
            held = [costs.activation[s] for s in range(stages) if placement[s] == rank]
            if sum(held) > cap:
                sizes = " + ".join(map(str, held))
                wrong.append(f"rank {rank} needs {sizes} = {sum(held)} bytes for one microbatch alone, and has {cap}")
    if wrong:
        raise ConfigError(
            f"no order for {stages} stages on {ranks} ranks with {num_microbatches} microbatches:\n"
            + "\n".join(f"  {line}" for line in wrong)
            + "\nIf bytes are short, raise cap_bytes, cut microbatches smaller, or recompute activations."
        )
    return problem_of(costs, placement, num_microbatches, caps)


def _size_problems(placement: Sequence[int], num_microbatches: int) -> list[str]:
    """A line for everything that is wrong with the number of microbatches and with where stages are."""
    wrong = [] if placement else ["the placement has no stage"]
    if num_microbatches < 1:
        wrong.append(f"num_microbatches is {num_microbatches}, needs 1 or more")
    empty = sorted(set(range(1 + max(placement, default=-1))) - set(placement))
    if empty or min(placement, default=0) < 0:
        wrong.append(f"placement {list(placement)} must name every rank from 0 on; without a stage: {empty or 'none'}")
    return wrong


def _cost_problems(costs: Costs, stages: int) -> list[str]:
    """A line for every list of costs that has too few or too many numbers, or impossible ones."""
    wrong = []
    lists: dict[str, tuple[Sequence[float] | None, int]] = {
        "forward": (costs.forward, stages),
        "input": (costs.input, stages),
        "weight": (costs.weight, stages),
        "backward": (costs.backward, stages),
        "transfer": (costs.transfer or None, stages - 1),
        "activation": (costs.activation or None, stages),
        "weight_part": (costs.weight_part, stages),
    }
    for name, (values, needed) in lists.items():
        if values is None:
            continue
        if len(values) != needed:
            wrong.append(f"costs.{name} has {len(values)} numbers, {stages} stages need {needed}")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            wrong.append(f"costs.{name} {list(values)} has numbers that are negative or not finite")
    if costs.activation and costs.weight_part is not None and len(costs.activation) == len(costs.weight_part):
        more = [s for s, (part, total) in enumerate(zip(costs.weight_part, costs.activation, strict=True)) if part > total]
        if more:
            wrong.append(f"costs.weight_part is more than costs.activation for stages {more}, of which it is a part")
    return wrong
