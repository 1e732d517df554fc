"""Lowering: adds to the actions of every rank the sends, receives and waits that they need.

The places of all transfers follow one simulated time, so that waits cannot form a cycle. The proof: say that an action comes
before another if it ends earlier, or, at equal ends, if the simulation ran it earlier. The sender of a message posts it right
after the action that produces it; its receiver posts it after some action. Call the later of these two actions the key of the
message. The receiver waits before the consumer, and the sender before some action; both of these come after the key. Messages of
one queue are posted in the same order at both ends. So keys ascend within a queue, no message is held up by one with a later key,
and every wait is for something that comes before it.
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
    """One end of a message, or the wait for it. Printed as torch writes it: `2SEND_F0`, `3RECV_F0`, `3WAIT_F0`.

    op:      "send" and "recv" post an end of the message, "wait" blocks until the message is complete.
    message: its number: unique in the pipeline, the same at both ends, ascending in the order in which messages are sent.
    peer:    the rank at the other end. stage: the stage at this end.
    kind:    "F" for an activation to the next stage, "B" for its gradient back.
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
    """A message from rank `source`, whose action number `made` produces it, to rank `target`, whose action `taken` consumes it.

    stage, taker: the stages of these two actions.
    """

    source: int
    made: int
    target: int
    taken: int
    stage: int
    taker: int
    kind: str
    microbatch: int


def fuse(table: Actions, costs: Costs | None = None) -> list[list[Action]]:
    """Replace each I that is followed by the W of the same stage and microbatch, and this W, by a B. Gradients keep every bit.

    A B hands on the gradient of its input only when all of it is done. With costs, a pair is replaced only if by the timeline
    nobody needs this gradient earlier, so that the timeline does not change. With costs, raises what `lower` raises.
    """
    pairs = _pairs(table)
    if costs is not None:
        starts, ends, _ = simulate(table, costs)
        pairs = _patient(pairs, table, find_places(table), starts, ends, costs)
    return [_fused(actions, follows) for actions, follows in zip(table, pairs, strict=True)]


def lower(
    table: Actions, costs: Costs | None = None, *, queues: str = "direction", lead: int = 1
) -> list[list[Action | Transfer]]:
    """Add the messages between ranks, at the places that a timeline gives. But for a sort, linear in the number of actions.

    First I and W become B where that delays nothing (see `fuse`). A send follows its producer. The wait for a send comes when the
    transfer is over by the timeline, but at least one action later, or at the end; until then the sender holds the tensor. A
    receive is posted `lead` actions before its consumer, or earlier if the transfer takes longer; the wait for it comes right
    before the consumer.

    costs: None stands for 1 for every F, I and W. queues: see `check_order`. A program for "single" runs on all kinds of queues,
    one for "pair" on all but "single". For "single", a receive is posted when by the timeline it is sent. "tag" gives the same as
    "direction".

    Raises ProgramError if the table does not have every stage of every microbatch exactly once, or if its actions wait for each
    other; ConfigError for unknown queues, a negative lead, or too few costs.
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
        table = [_fused(actions, follows) for actions, follows in zip(table, pairs, strict=True)]
        if costs.backward is None:
            starts, ends, bursts = _fused_times(pairs, starts, ends, bursts)
        else:
            starts, ends, bursts = simulate(table, costs)
    messages = _messages(table, places, bursts, ends)
    posts = _receive_posts(messages, starts, ends, costs, queues, lead)
    waits = _send_waits(messages, posts, ends, costs)
    return _written(table, messages, posts, waits)


def _pairs(table: Actions) -> list[list[int]]:
    """For each rank, the indices of every W that comes right after the I of the same stage and microbatch."""
    return [
        [i for i, (stage, kind, m) in enumerate(actions) if kind == "W" and i and actions[i - 1] == (stage, "I", m)]
        for actions in table
    ]


def _patient(
    pairs: Sequence[Sequence[int]], table: Actions, places: Places, starts: Times, ends: Times, costs: Costs
) -> list[list[int]]:
    """The pairs whose gradient can be sent after the W without delaying its consumer or a later transfer on the same channel."""
    stages, count, place, _ = places
    slow = any(costs.transfer)
    forward, backward = _numbers(table, places)
    kept = []
    for rank, actions in enumerate(table):
        good, follows, end = [], set(pairs[rank]), ends[rank]
        due: dict[int, float] = {}  # by target: when the next transfer to it must begin
        for index in range(len(actions) - 1, -1, -1) if follows else ():
            stage, kind, microbatch = actions[index]
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


def _fused(actions: Sequence[Action], follows: Sequence[int]) -> list[Action]:
    """The actions without the W at these indices, and with a B in place of the I before each of them."""
    fused = list(actions)
    for index in follows:
        stage, _, microbatch = actions[index]
        fused[index - 1] = tuple.__new__(Action, (stage, "B", microbatch))
    dropped = set(follows)
    return [action for index, action in enumerate(fused) if index not in dropped] if dropped else fused


def _fused_times(pairs: Sequence[Sequence[int]], starts: Times, ends: Times, bursts: Bursts) -> tuple[Times, Times, Bursts]:
    """The times of the fused actions, for costs in which a B takes as long as I and W together."""
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
    """For each slot (stage * microbatches + microbatch), the index of its F, and of its B or I, among the actions of its rank."""
    count = places.microbatches
    forward, backward = [0] * len(places.rank), [0] * len(places.rank)
    for actions in table:
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind == "F":
                forward[stage * count + microbatch] = index
            elif kind != "W":
                backward[stage * count + microbatch] = index
    return forward, backward


def _messages(table: Actions, places: Places, bursts: Bursts, ends: Times) -> list[_Message]:
    """All messages between ranks, in the order in which their producers end; at equal ends, in the order of the simulation."""
    stages, count, place, _ = places
    forward, backward = _numbers(table, places)
    messages: list[_Message] = []
    new, add = tuple.__new__, messages.append
    for rank, first, last in bursts:
        actions = table[rank]
        for index in range(first, last):
            stage, kind, microbatch = actions[index]
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
    """For each message, the index of the target's action before which the receive is posted."""
    if queues == "single":  # after the actions that the target has done when the message is sent
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
    """Move receives behind the sends of earlier messages in the same queue, which the target shares with its own sends."""
    sent: dict[tuple[int, int], int] = {}
    for number, (source, made, target, _, _, _, _, _) in enumerate(messages):
        this_queue, other_queue = (source, target), (target, source)
        if queues == "single":
            this_queue, other_queue = (source, -1), (target, -1)
        sent[this_queue] = made + 1
        posts[number] = max(posts[number], sent.get(other_queue, 0))
    return posts


def _send_waits(messages: Sequence[_Message], posts: Sequence[int], ends: Times, costs: Costs) -> list[int]:
    """For each message, the index of the source's action before which the source waits for the send.

    By the timeline, this action comes after the receive is posted and the transfer is over.
    """
    slow = any(costs.transfer)
    free: dict[tuple[int, int], float] = {}
    waits = []
    for (source, made, target, _, stage, taker, _, _), post in zip(messages, posts, strict=True):
        source_ends = ends[source]
        sent, posted = source_ends[made], ends[target][post - 1] if post else 0.0
        over = sent if sent > posted else posted
        if slow:
            over = max(over, free.get((source, target), 0.0)) + costs.transfer[min(stage, taker)]
            free[source, target] = over
        wait = made + 2
        if wait < len(source_ends) and (source_ends[wait - 1] < over or source_ends[wait] <= posted):
            wait = max(wait, bisect_left(source_ends, over, made) + 1, bisect_right(source_ends, posted, made))
        waits.append(wait if wait < len(source_ends) else len(source_ends))
    return waits


def _written(
    table: Actions, messages: Sequence[_Message], posts: Sequence[int], waits: Sequence[int]
) -> list[list[Action | Transfer]]:
    """The actions, and before each of them its transfers: first posts, then waits, both in the order of messages."""
    before: list[list[list[Transfer]]] = [[[] for _ in range(len(actions) + 1)] for actions in table]
    new = tuple.__new__
    for number, (source, made, target, _, stage, taker, kind, microbatch) in enumerate(messages):
        before[source][made + 1].append(new(Transfer, ("send", number, target, stage, kind, microbatch)))
        before[target][posts[number]].append(new(Transfer, ("recv", number, source, taker, kind, microbatch)))
    for number, (source, _, target, taken, stage, taker, kind, microbatch) in enumerate(messages):
        before[source][waits[number]].append(new(Transfer, ("wait", number, target, stage, kind, microbatch)))
        before[target][taken].append(new(Transfer, ("wait", number, source, taker, kind, microbatch)))
    lowered: list[list[Action | Transfer]] = []
    for actions, places in zip(table, before, strict=True):
        program: list[Action | Transfer] = []
        for action, transfers in zip(actions, places, strict=False):
            program += transfers
            program.append(action)
        program += places[-1]
        lowered.append(program)
    return lowered
