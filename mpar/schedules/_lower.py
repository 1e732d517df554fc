"""Lowering: from what ranks compute to what they also send, receive and wait for.

All positions follow one simulated time, so that waits can not form a cycle. Say that an action comes before another if it ends
earlier, at equal ends if the simulation ran it earlier. A message is posted by its sender right after its producer, and by its
receiver after some action; call the later of the two its key. Its receiver waits before the consumer, which comes after both. Its
sender waits before an action that comes after both. Messages of one queue are posted in the same order at both ends, so the keys
of a queue ascend and no message is held up by one with a later key: every wait is for what comes before it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mpar.errors import ConfigError
from mpar.schedules._action import Action, Actions
from mpar.schedules._collector import paused_collector
from mpar.schedules._order import QUEUES
from mpar.schedules._places import Places, find_places
from mpar.schedules._timeline import Bursts, Costs, Times, simulate

__all__ = ["Transfer", "fuse", "lower"]


class Transfer(NamedTuple):
    """One end of a message, or the wait for it; printed as torch writes it: `2SEND_F0`, `3RECV_F0`, `3WAIT_F0`.

    op: "send" and "recv" post an end, "wait" blocks until the message is complete. message: unique in the pipeline, the same at
    both ends, ascending in the order in which messages are sent. peer: rank at the other end. stage: at this end.
    kind: "F", an activation to the next stage, or "B", its gradient back.
    """

    op: str
    message: int
    peer: int
    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.upper()}_{self.kind}{self.microbatch}"


class _Message(NamedTuple):
    """From action number `made` of rank `source` to number `taken` of rank `target`."""

    source: int
    made: int
    target: int
    taken: int
    stage: int
    taker: int
    kind: str
    microbatch: int


def fuse(table: Actions, costs: Costs | None = None) -> list[list[Action]]:
    """Make B of each I that the W of the same stage and microbatch follows. Gradients stay the same to the bit.

    B gives the gradient of its input away only when all of it is done. With costs, only those become B whose gradient nobody
    needs earlier, by the timeline: it does not change. Raises as `lower` does, if there are costs.
    """
    pairs = _pairs(table)
    if costs is not None:
        starts, ends, _ = simulate(table, costs)
        pairs = _patient(pairs, table, find_places(table), starts, ends, costs)
    return [_fused(own, follows) for own, follows in zip(table, pairs, strict=True)]


def lower(
    table: Actions, costs: Costs | None = None, *, queues: str = "direction", lead: int = 1
) -> list[list[Action | Transfer]]:
    """Put the messages between ranks where a timeline needs them. Linear in the number of actions but for a sort.

    First I and W become B where that delays nothing (see `fuse`). A send follows its producer. The wait for it comes when the
    transfer is over by the timeline, at least one action later or at the end: until then the sender holds the tensor. A receive
    is posted `lead` actions before its consumer, earlier if the transfer takes longer; its wait stands right before the consumer.

    costs: None is 1 for every F, I and W. queues: see `check_order`; a program made for "single" runs on all kinds, one for
    "pair" on all but "single". For "single" a receive is posted when it is sent, by the timeline. "tag" is as "direction".

    Raises ProgramError if the table does not do each stage of each microbatch once, or waits for itself; ConfigError for unknown
    queues, a negative lead, or too few costs.
    """
    if queues not in QUEUES:
        raise ConfigError(f"queues are {', '.join(map(repr, QUEUES))}, not {queues!r}")
    if lead < 0:
        raise ConfigError(f"receives are posted 0 or more actions before their consumers, not {lead}")
    with paused_collector():
        return _lower(table, costs, queues, lead)


def _lower(table: Actions, costs: Costs | None, queues: str, lead: int) -> list[list[Action | Transfer]]:
    places = find_places(table)
    costs = Costs.uniform(places.stages) if costs is None else costs
    starts, ends, bursts = simulate(table, costs)
    pairs = _pairs(table)
    if any(pairs):
        pairs = _patient(pairs, table, places, starts, ends, costs)
        table = [_fused(own, follows) for own, follows in zip(table, pairs, strict=True)]
        if costs.backward is None:
            starts, ends, bursts = _fused_times(pairs, starts, ends, bursts)
        else:
            starts, ends, bursts = simulate(table, costs)
    messages = _messages(table, places, bursts, ends)
    posts = _receive_posts(messages, starts, ends, costs, queues, lead)
    waits = _send_waits(messages, posts, ends, costs)
    return _written(table, messages, posts, waits)


def _pairs(table: Actions) -> list[list[int]]:
    """Per rank, numbers of each W that the I of the same stage and microbatch precedes."""
    return [
        [i for i, (stage, kind, microbatch) in enumerate(own) if kind == "W" and i and own[i - 1] == (stage, "I", microbatch)]
        for own in table
    ]


def _patient(
    pairs: Sequence[Sequence[int]], table: Actions, places: Places, starts: Times, ends: Times, costs: Costs
) -> list[list[int]]:
    """Those pairs of which the gradient may leave after W and still be in time, and all that is behind it on its way."""
    stages, count, place, _ = places
    slow = any(costs.transfer)
    forward, backward = _numbers(table, places)
    kept = []
    for rank, own in enumerate(table):
        good, follows, end = [], set(pairs[rank]), ends[rank]
        due: dict[int, float] = {}  # by target: when the next transfer to it must begin
        for index in range(len(own) - 1, -1, -1) if follows else ():
            stage, kind, microbatch = own[index]
            if kind == "W" or (not slow and index + 1 not in follows):
                continue
            taker = stage + 1 if kind == "F" else stage - 1
            latest = float("inf")
            if 0 <= taker < stages:
                slot = taker * count + microbatch
                target = place[slot]
                if target != rank:
                    start = starts[target][(forward if kind == "F" else backward)[slot]]
                    latest = min(start, due.get(target, start))
                    if slow:
                        latest = due[target] = latest - costs.transfer[min(stage, taker)]
            if index + 1 in follows and end[index + 1] <= latest:
                good.append(index + 1)
        kept.append(good[::-1])
    return kept


def _fused(own: Sequence[Action], follows: Sequence[int]) -> list[Action]:
    """Without each W of these numbers, B for the I before it."""
    fused = list(own)
    for index in follows:
        stage, _, microbatch = own[index]
        fused[index - 1] = tuple.__new__(Action, (stage, "B", microbatch))
    dropped = set(follows)
    return [action for index, action in enumerate(fused) if index not in dropped] if dropped else fused


def _fused_times(pairs: Sequence[Sequence[int]], starts: Times, ends: Times, bursts: Bursts) -> tuple[Times, Times, Bursts]:
    """Where B takes as long as I and W."""
    new_starts, new_ends = [], []
    for start, end, follows in zip(starts, ends, pairs, strict=True):
        dropped = set(follows)
        new_starts.append([time for index, time in enumerate(start) if index not in dropped])
        new_ends.append([time for index, time in enumerate(end) if index + 1 not in dropped])
    new_bursts = [
        (rank, first - bisect_left(pairs[rank], first), last - bisect_left(pairs[rank], last)) for rank, first, last in bursts
    ]
    return new_starts, new_ends, new_bursts


def _numbers(table: Actions, places: Places) -> tuple[list[int], list[int]]:
    """Of each slot, the numbers that its F, and its B or I, have on their rank."""
    count = places.microbatches
    forward, backward = [0] * len(places.rank), [0] * len(places.rank)
    for own in table:
        for index, (stage, kind, microbatch) in enumerate(own):
            if kind == "F":
                forward[stage * count + microbatch] = index
            elif kind != "W":
                backward[stage * count + microbatch] = index
    return forward, backward


def _messages(table: Actions, places: Places, bursts: Bursts, ends: Times) -> list[_Message]:
    """What goes from one rank to another, by the end of the producer; at equal ends as the simulation came by them."""
    stages, count, place, _ = places
    forward, backward = _numbers(table, places)
    messages: list[_Message] = []
    new, add = tuple.__new__, messages.append
    for rank, first, last in bursts:
        own = table[rank]
        for index in range(first, last):
            stage, kind, microbatch = own[index]
            if kind == "F":
                taker = stage + 1
                if taker < stages:
                    slot = taker * count + microbatch
                    target = place[slot]
                    if target != rank:
                        add(new(_Message, (rank, index, target, forward[slot], stage, taker, "F", microbatch)))
            elif kind != "W" and stage:
                taker = stage - 1
                slot = taker * count + microbatch
                target = place[slot]
                if target != rank:
                    add(new(_Message, (rank, index, target, backward[slot], stage, taker, "B", microbatch)))
    messages.sort(key=lambda message: ends[message[0]][message[1]])
    return messages


def _receive_posts(messages: Sequence[_Message], starts: Times, ends: Times, costs: Costs, queues: str, lead: int) -> list[int]:
    """Before which action of the target each receive is posted."""
    if queues == "single":  # what the target has done when the message is sent
        return _after_sends(messages, [bisect_left(ends[m[2]], ends[m[0]][m[1]]) for m in messages], queues)
    slow, ranks = any(costs.transfer), len(ends)
    posts = [0] * len(messages)
    before: dict[int, int] = {}  # by queue: the post that comes next
    due: dict[int, float] = {}  # by direction: when the next transfer must begin
    number = len(messages)
    for source, made, target, taken, stage, taker, _, _ in reversed(messages):
        number -= 1
        lane = source * ranks + target
        post = max(taken - lead, 0)
        if slow:
            start = starts[target][taken]
            latest = due[lane] = min(start, due.get(lane, start)) - costs.transfer[min(stage, taker)]
            post = min(post, bisect_right(ends[target], latest))
        posts[number] = before[lane] = min(post, before.get(lane, post))
        if queues == "pair":
            before[target * ranks + source] = made + 1
    return _after_sends(messages, posts, queues) if queues == "pair" else posts


def _after_sends(messages: Sequence[_Message], posts: list[int], queues: str) -> list[int]:
    """Post no receive before an earlier message of its queue is sent: the target shares the queue for its own sends."""
    sent: dict[tuple[int, int], int] = {}
    for number, (source, made, target, _, _, _, _, _) in enumerate(messages):
        here, there = (source, target), (target, source)
        if queues == "single":
            here, there = (source, -1), (target, -1)
        sent[here] = made + 1
        posts[number] = max(posts[number], sent.get(there, 0))
    return posts


def _send_waits(messages: Sequence[_Message], posts: Sequence[int], ends: Times, costs: Costs) -> list[int]:
    """Before which action of the source it waits for its send: one that comes after the receive is posted, by the timeline."""
    slow = any(costs.transfer)
    free: dict[tuple[int, int], float] = {}
    waits = []
    for (source, made, target, _, stage, taker, _, _), post in zip(messages, posts, strict=True):
        own = ends[source]
        sent, posted = own[made], ends[target][post - 1] if post else 0.0
        over = sent if sent > posted else posted
        if slow:
            over = max(over, free.get((source, target), 0.0)) + costs.transfer[min(stage, taker)]
            free[source, target] = over
        wait = made + 2
        if wait < len(own) and (own[wait - 1] < over or own[wait] <= posted):
            wait = max(wait, bisect_left(own, over, made) + 1, bisect_right(own, posted, made))
        waits.append(wait if wait < len(own) else len(own))
    return waits


def _written(
    table: Actions, messages: Sequence[_Message], posts: Sequence[int], waits: Sequence[int]
) -> list[list[Action | Transfer]]:
    """The actions with what comes before each: posts, then waits, in the order of messages."""
    before: list[list[list[Transfer]]] = [[[] for _ in range(len(own) + 1)] for own in table]
    new = tuple.__new__
    for number, (source, made, target, _, stage, taker, kind, microbatch) in enumerate(messages):
        before[source][made + 1].append(new(Transfer, ("send", number, target, stage, kind, microbatch)))
        before[target][posts[number]].append(new(Transfer, ("recv", number, source, taker, kind, microbatch)))
    for number, (source, _, target, taken, stage, taker, kind, microbatch) in enumerate(messages):
        before[source][waits[number]].append(new(Transfer, ("wait", number, target, stage, kind, microbatch)))
        before[target][taken].append(new(Transfer, ("wait", number, source, taker, kind, microbatch)))
    lowered: list[list[Action | Transfer]] = []
    for own, places in zip(table, before, strict=True):
        program: list[Action | Transfer] = []
        for action, transfers in zip(own, places, strict=False):
            program += transfers
            program.append(action)
        program += places[-1]
        lowered.append(program)
    return lowered
