"""The analysis of test_streams.py against trying out: small plans are spoiled at random, and their queues run in every order."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from mpar.ir import HOME, START, Issue, plan_streams
from tests.runtime.test_streams import Communicating, check_plan, random_program

LONGEST = 9
NUM_PROGRAMS, MUTANTS_EACH = 500, 4
OTHERS = 10**6  # what a storage holds that is written by whoever gets its memory next


class Wrong(Exception):
    """What goes wrong in one of the orders."""


class Trial:
    """All orders in which the queues may run a plan, on storages that remember which line wrote them last."""

    def __init__(self, instructions, values, issues):
        self.instructions, self.values, self.issues = instructions, values, issues
        self.end = len(instructions)
        self.makers = {value: line for line, step in enumerate(instructions) for value in step.outputs}
        self.takes = self._taken()
        self.queues, self.after = {HOME: [START]}, {}
        self._issue()
        self.seen = set()

    def _issue(self):
        """Put the lines on their queues, in the order in which a host issues them. A wait belongs to what comes next there."""
        pending, recorded = {}, {START}
        for line, issue in enumerate(self.issues):
            waits = [(issue.queue, awaited) for awaited in issue.waits]
            for queue, awaited in waits:
                self._wait(pending, recorded, queue, awaited)
            self.queues.setdefault(issue.queue, []).append(line)
            self.after[line] = pending.pop(issue.queue, ())
            recorded |= {line} if issue.records else set()
            for queue, awaited in issue.holds:
                self._wait(pending, recorded, queue, awaited)
        self.queues[HOME].append(self.end)
        self.after |= {START: (), self.end: pending.pop(HOME, ())}

    def _wait(self, pending, recorded, queue, awaited):
        if awaited not in recorded:
            raise Wrong(f"{queue} waits for an event that was not recorded: {awaited}")
        pending[queue] = (*pending.get(queue, ()), awaited)

    def _taken(self):
        """For each line the storages whose memory it may write as its own: those that went back to its queue before it was
        issued, or while it runs."""
        names, home, back, takes = {}, {}, {}, []
        for line, (step, issue) in enumerate(zip(self.instructions, self.issues, strict=True)):
            touched = {self.values[value].storage for value in (*step.inputs, *step.outputs)}
            for value in (*step.inputs, *step.outputs):
                storage = self.values[value].storage
                home.setdefault(storage, issue.queue if value in step.outputs else HOME)
                names.setdefault(storage, set()).add(value)
            for value in step.frees:
                names[self.values[value].storage].discard(value)
            gone = {storage for storage, held in names.items() if not held and storage not in back}
            back |= {storage: (home[storage], line if storage in touched else line + 1) for storage in gone}
            takes.append([storage for storage, (queue, when) in back.items() if queue == issue.queue and when <= line])
        return takes

    def run(self, done=frozenset(), cells=()):
        """Go on in every order from here. Raises Wrong."""
        if (done, cells) in self.seen:
            return
        self.seen.add((done, cells))
        for lines in self.queues.values():
            line = next((line for line in lines if line not in done), None)
            if line is not None and done.issuperset(self.after[line]):
                self.run(done | {line}, self._step(line, done, dict(cells)))

    def _step(self, line, done, cells):
        """What the storages hold after a line."""
        if line == START:
            return ()
        if START not in done:
            raise Wrong(f"line {line} runs before the step began")
        if line == self.end:
            if len(done) <= self.end:
                raise Wrong("the step ends before its lines")
            return ()
        step = self.instructions[line]
        for value in step.inputs:
            held = cells.get(self.values[value].storage, START)
            if not self.makers.get(value, START) <= held < line:
                raise Wrong(f"line {line} reads {value}, and finds what {held} wrote")
        for storage in {self.values[value].storage for value in step.outputs}:
            if cells.get(storage, START) > line:
                raise Wrong(f"line {line} writes over {cells[storage]}")
            cells[storage] = line
        return tuple(sorted((cells | dict.fromkeys(self.takes[line], OTHERS)).items()))


def drop_wait(rng, issues):
    """A queue does not wait for a line."""
    return _change(rng, issues, lambda issue: issue.waits, lambda issue: replace(issue, waits=_without_one(rng, issue.waits)))


def drop_hold(rng, issues):
    """A queue does not wait before it goes on."""
    return _change(rng, issues, lambda issue: issue.holds, lambda issue: replace(issue, holds=_without_one(rng, issue.holds)))


def drop_record(rng, issues):
    """An event is not recorded."""
    return _change(rng, issues, lambda issue: issue.records, lambda issue: replace(issue, records=False))


def move_wait(rng, issues):
    """Another line waits."""
    lines = [line for line, issue in enumerate(issues) if issue.waits]
    if not lines:
        return None
    at, to = rng.choice(lines), rng.randrange(len(issues))
    awaited = rng.choice(issues[at].waits)
    out = list(issues)
    out[at] = replace(out[at], waits=tuple(other for other in out[at].waits if other != awaited))
    out[to] = replace(out[to], waits=(*out[to].waits, awaited))
    return out


def wait_for_another(rng, issues):
    """A queue waits for another line that has an event."""
    events = [START, *(line for line, issue in enumerate(issues) if issue.records)]
    return _change(
        rng,
        issues,
        lambda issue: issue.waits,
        lambda issue: replace(issue, waits=(*_without_one(rng, issue.waits), rng.choice(events))),
    )


def other_queue(rng, issues):
    """A line runs on another queue."""
    queues = [HOME, *{issue.queue for issue in issues}, "another"]
    return _change(rng, issues, lambda issue: True, lambda issue: replace(issue, queue=rng.choice(queues)))


def _without_one(rng, items):
    at = rng.randrange(len(items))
    return items[:at] + items[at + 1 :]


def _change(rng, issues, eligible, change) -> list[Issue] | None:
    lines = [line for line, issue in enumerate(issues) if eligible(issue)]
    if not lines:
        return None
    out, at = list(issues), rng.choice(lines)
    out[at] = change(out[at])
    return out


MUTATIONS = (drop_wait, drop_hold, drop_record, move_wait, wait_for_another, other_queue)


def mutants(seed):
    """A random program, and some plans that differ from the one that is made for it."""
    rng = random.Random(seed)
    program = random_program(seed, LONGEST)
    issues = plan_streams(*program, {"k": Communicating()})
    found = []
    while len(found) < MUTANTS_EACH:
        mutation = rng.choice(MUTATIONS)
        spoiled = mutation(rng, issues)
        if spoiled is not None and spoiled != issues:
            found.append((mutation.__name__, spoiled))
    return program, issues, found


def refused(instructions, values, issues):
    """Why the analysis refuses a plan, or None."""
    try:
        check_plan(instructions, values, issues)
    except AssertionError as error:
        return str(error)
    return None


def goes_wrong(instructions, values, issues):
    """What goes wrong in some order, or None."""
    try:
        Trial(instructions, values, issues).run()
    except Wrong as wrong:
        return str(wrong)
    return None


@dataclass(frozen=True)
class Judged:
    """A plan, how it was spoiled, and what the two judges say of it: None if it is right."""

    seed: int
    mutation: str
    plan: list[Issue]
    analysed: str | None
    tried: str | None


@pytest.fixture(scope="module")
def judged():
    """The plans of random programs, and spoiled ones."""
    found = []
    for seed in range(NUM_PROGRAMS):
        program, issues, spoiled = mutants(seed)
        for name, plan in [("none", issues), *spoiled]:
            found.append(Judged(seed, name, plan, refused(*program, plan), goes_wrong(*program, plan)))
    return found


def test_analysis_agrees_with_all_orders(judged):
    """The analysis refuses one of 2,000 spoiled plans if and only if some order of its queues goes wrong."""
    assert len(judged) == NUM_PROGRAMS * (1 + MUTANTS_EACH)
    wrong = [one for one in judged if (one.analysed is None) != (one.tried is None)]
    assert not wrong, f"{len(wrong)} disagreements, the first: {wrong[0]}"


def test_mutants_are_of_both_kinds(judged):
    """No plan is wrong before it is spoiled, and each mutation makes wrong ones. Not every change is wrong, because some queues
    wait although nothing comes after."""
    verdicts = Counter((one.mutation, one.tried is None) for one in judged)
    some = NUM_PROGRAMS / 10
    assert verdicts["none", False] == 0
    assert all(verdicts[mutation.__name__, False] >= some for mutation in MUTATIONS), verdicts
    assert sum(count for (name, right), count in verdicts.items() if name != "none" and right) >= some, verdicts
