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
    needs earlier, by the timeline: it does not change.
    """
    held: set[tuple[int, int]] = set()
    if costs is not None:
        places = find_places(table)
        starts, ends, bursts = simulate(table, costs)
        held = _urgent(table, _messages(table, places, bursts, ends), starts, ends, costs)
    return [_fused(own, rank, held) for rank, own in enumerate(table)]


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
    places = find_places(table)
    costs = Costs.uniform(places.stages) if costs is None else costs
    starts, ends, bursts = simulate(table, costs)
    messages = _messages(table, places, bursts, ends)
    if any(action[1] == "I" for own in table for action in own):
        held = _urgent(table, messages, starts, ends, costs)
        table = [_fused(own, rank, held) for rank, own in enumerate(table)]
        starts, ends, bursts = simulate(table, costs)
        messages = _messages(table, places, bursts, ends)
    posts = _receive_posts(messages, starts, ends, costs, queues, lead)
    waits = _send_waits(messages, posts, ends, costs)
    return _written(table, messages, posts, waits)


def _messages(table: Actions, places: Places, bursts: Bursts, ends: Times) -> list[_Message]:
    """What goes from one rank to another, by the end of the producer; at equal ends as the simulation came by them."""
    stages, count, place, _ = places
    forward, backward = [0] * len(place), [0] * len(place)  # number of the action on its rank
    for own in table:
        for index, (stage, kind, microbatch) in enumerate(own):
            if kind == "F":
                forward[stage * count + microbatch] = index
            elif kind != "W":
                backward[stage * count + microbatch] = index
    messages = []
    new = tuple.__new__
    for rank, first, last in bursts:
        own = table[rank]
        for index in range(first, last):
            stage, kind, microbatch = own[index]
            if kind == "F":
                taker, numbers = stage + 1, forward
                if taker == stages:
                    continue
            elif kind == "W" or not stage:
                continue
            else:
                taker, numbers, kind = stage - 1, backward, "B"
            slot = taker * count + microbatch
            target = place[slot]
            if target != rank:
                messages.append(new(_Message, (rank, index, target, numbers[slot], stage, taker, kind, microbatch)))
    messages.sort(key=lambda message: ends[message[0]][message[1]])
    return messages


def _transfer_times(messages: Sequence[_Message], costs: Costs) -> list[float]:
    if not any(costs.transfer):
        return [0.0] * len(messages)
    return [costs.transfer[min(message.stage, message.taker)] for message in messages]


def _latest(messages: Sequence[_Message], starts: Times, costs: Costs) -> list[float]:
    """When each transfer must begin so that it, and those behind it from the same rank to the same rank, are there in time."""
    due: dict[tuple[int, int], float] = {}
    latest = [0.0] * len(messages)
    times = _transfer_times(messages, costs)
    for number in range(len(messages) - 1, -1, -1):
        source, _, target, taken, *_ = messages[number]
        start = starts[target][taken]
        latest[number] = due[source, target] = min(start, due.get((source, target), start)) - times[number]
    return latest


def _urgent(table: Actions, messages: Sequence[_Message], starts: Times, ends: Times, costs: Costs) -> set[tuple[int, int]]:
    """(rank, number) of each I whose gradient would come too late if it left after the next action."""
    late = zip(messages, _latest(messages, starts, costs), strict=True)
    return {
        (message.source, message.made)
        for message, latest in late
        if message.kind == "B"
        and table[message.source][message.made][1] == "I"
        and message.made + 1 < len(ends[message.source])
        and ends[message.source][message.made + 1] > latest
    }


def _fused(own: Sequence[Action], rank: int, held: set[tuple[int, int]]) -> list[Action]:
    fused: list[Action] = []
    for index, action in enumerate(own):
        stage, kind, microbatch = action
        if kind == "W" and index and own[index - 1] == (stage, "I", microbatch) and (rank, index - 1) not in held:
            fused[-1] = Action(stage, "B", microbatch)
        else:
            fused.append(action)
    return fused


def _receive_posts(messages: Sequence[_Message], starts: Times, ends: Times, costs: Costs, queues: str, lead: int) -> list[int]:
    """Before which action of the target each receive is posted."""
    if queues == "single":  # what the target has done when the message is sent
        posts = [bisect_left(ends[target], ends[source][made]) for source, made, target, *_ in messages]
        return _after_sends(messages, posts, queues)
    posts = [max(message[3] - lead, 0) for message in messages]
    if any(costs.transfer):
        latest = _latest(messages, starts, costs)
        posts = [min(post, bisect_right(ends[m.target], due)) for m, post, due in zip(messages, posts, latest, strict=True)]
    before: dict[tuple[int, int], int] = {}  # of what is later in the queue
    for number in range(len(messages) - 1, -1, -1):
        source, made, target, *_ = messages[number]
        posts[number] = before[source, target] = min(posts[number], before.get((source, target), posts[number]))
        if queues == "pair":
            before[target, source] = made + 1
    return _after_sends(messages, posts, queues) if queues == "pair" else posts


def _after_sends(messages: Sequence[_Message], posts: list[int], queues: str) -> list[int]:
    """Post no receive before an earlier message of its queue is sent: the target shares the queue for its own sends."""
    sent: dict[tuple[int, int], int] = {}
    for number, (source, made, target, *_) in enumerate(messages):
        here, there = (source, target), (target, source)
        if queues == "single":
            here, there = (source, -1), (target, -1)
        sent[here] = made + 1
        posts[number] = max(posts[number], sent.get(there, 0))
    return posts


def _send_waits(messages: Sequence[_Message], posts: Sequence[int], ends: Times, costs: Costs) -> list[int]:
    """Before which action of the source it waits for its send: one that comes after the receive is posted, by the timeline."""
    free: dict[tuple[int, int], float] = {}
    waits = []
    for message, post, time in zip(messages, posts, _transfer_times(messages, costs), strict=True):
        source, made, target, *_ = message
        own = ends[source]
        posted = ends[target][post - 1] if post else 0.0
        over = max(own[made], posted)
        if time:
            over = free[source, target] = max(over, free.get((source, target), 0.0)) + time
        wait = max(made + 2, bisect_left(own, over, made) + 1, bisect_right(own, posted, made))
        waits.append(min(wait, len(own)))
    return waits


def _written(
    table: Actions, messages: Sequence[_Message], posts: Sequence[int], waits: Sequence[int]
) -> list[list[Action | Transfer]]:
    """The actions with what comes before each: posts in the order of messages, then waits, those for sends first."""
    before: list[list[list[Transfer]]] = [[[] for _ in range(len(own) + 1)] for own in table]
    new = tuple.__new__
    for number, (source, made, target, _, stage, taker, kind, microbatch) in enumerate(messages):
        before[source][made + 1].append(new(Transfer, ("send", number, target, stage, kind, microbatch)))
        before[target][posts[number]].append(new(Transfer, ("recv", number, source, taker, kind, microbatch)))
    for number, (source, _, target, _, stage, _, kind, microbatch) in enumerate(messages):
        before[source][waits[number]].append(new(Transfer, ("wait", number, target, stage, kind, microbatch)))
    for number, (source, _, target, taken, _, taker, kind, microbatch) in enumerate(messages):
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
