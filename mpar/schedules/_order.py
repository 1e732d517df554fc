"""Proves that ranks which send, receive, wait and meet in a fixed order come to an end, whatever the timing.

Programs are straight lines that name their partners, so all maximal runs end in the same state (a Kahn network), and one run
without any buffering decides. A transfer is complete when both of its ends are posted and both are first in their queues.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from mpar.errors import ConfigError, ProgramError

__all__ = ["QUEUES", "Event", "check_order"]

QUEUES = ("direction", "pair", "single", "tag")
_SHOWN = 8  # offenders that an error spells out


class Event(NamedTuple):
    """Something that a rank does together with others.

    op:    "send" and "recv" post one end of a message and go on; "wait" blocks until the message is complete; "meet" blocks until
           all members have arrived.
    key:   the id of the message, unique in the pipeline; for a meeting any value that is the same for all members.
    peers: the rank at the other end; for a meeting all members.
    line:  the line of the rank's program, for error messages.
    """

    op: str
    key: Hashable
    peers: tuple[int, ...]
    line: int


Describe = Callable[[int, int], str]


def check_order(
    events_per_rank: Sequence[Sequence[Event]], *, queues: str = "direction", describe: Describe | None = None
) -> None:
    """Prove that the events of all ranks come to an end. Linear in their number.

    queues: which messages are transferred in the order in which they are posted. "direction": those from one rank to another.
    "pair": those between two ranks, in both directions. "single": all messages of a rank. "tag": none, as messages are matched by
    their id.
    describe: gives the text of (rank, line), for error messages.

    Raises ProgramError if an end of a message is missing, is posted twice or names a wrong peer; if a rank waits for a message
    that it has not posted, waits for one twice, or never waits for one (its tensor would be held for ever); if the n-th message
    sent from one rank to another is not the n-th received; if members of a meeting arrive with different keys; if ranks wait for
    each other in a cycle, of which the error gives the shortest. Raises ConfigError for an unknown kind of queues.
    """
    if queues not in QUEUES:
        raise ConfigError(f"queues are {', '.join(map(repr, QUEUES))}, not {queues!r}")
    network = _Network(events_per_rank, queues, describe)
    _read(network)
    _check_ends(network)
    if queues != "tag":
        _check_fifo(network)
    _check_meetings(network)
    reached, missing = _run(network)
    if any(position < len(events) for position, events in zip(reached, events_per_rank, strict=True)):
        raise ProgramError(_deadlock(network, reached, missing))


@dataclass
class _Network:
    """All events, with messages numbered in the order in which they are read. End 0 of a message sends it, end 1 receives it."""

    events: Sequence[Sequence[Event]]
    queues: str
    describe: Describe | None
    number: dict[Hashable, int] = field(default_factory=dict)
    keys: list[Hashable] = field(default_factory=list)  # by number
    rank: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # [end][message]; -1: no rank posts it
    line: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    programs: list[list[int]] = field(default_factory=list)  # per rank: message * 2 for a post, message * 2 + 1 for a wait, -1
    lanes: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)  # (source, target, end): messages as posted
    meetings: dict[tuple[int, ...], dict[int, list[tuple[Hashable, int]]]] = field(
        default_factory=dict
    )  # members: rank: key, line

    def number_of(self, key: Hashable) -> int:
        """The number of a message, a new one if its key is new."""
        message = self.number.setdefault(key, len(self.number))
        if message == len(self.keys):
            self.keys.append(key)
            for places in (*self.rank, *self.line):
                places.append(-1)
        return message

    def text(self, rank: int, line: int, otherwise: str = "") -> str:
        """`rank 3, line 118 (3RECV_F0)`."""
        words = otherwise if self.describe is None else self.describe(rank, line)
        return f"rank {rank}, line {line}" + (f" ({words})" if words else "")

    def end(self, message: int, end: int) -> str:
        """The place where an end of a message is posted."""
        return self.text(self.rank[end][message], self.line[end][message], f"{('send', 'recv')[end]} {self.keys[message]}")


def _read(network: _Network) -> None:
    """Number the messages. Raise ProgramError for all faults that can be seen on a single rank."""
    wrong: list[str] = []
    for rank, events in enumerate(network.events):
        program: list[int] = []
        waited: dict[int, bool] = {}  # for each message that this rank has posted, whether it has waited for it
        posted: dict[tuple[int, int], list[int]] = {}  # (peer, end): messages
        network.programs.append(program)
        for event in events:
            if event.op == "meet":
                program.append(-1)
                problem = _read_meeting(network, rank, event)
            elif event.op == "wait":
                message = network.number_of(event.key)
                program.append(message * 2 + 1)
                problem = _read_wait(network, rank, event, waited.get(message))
                waited[message] = True
            else:
                message = network.number_of(event.key)
                program.append(message * 2)
                side = int(event.op == "recv")
                if (problem := _misdirected(network, rank, event)) is None:
                    problem = _read_post(network, rank, event, message, side)
                    waited[message] = False
                    posted.setdefault((event.peers[0], side), []).append(message)
            wrong += [problem] if problem is not None else []
        for (peer, side), messages in posted.items():
            network.lanes[(peer, rank, 1) if side else (rank, peer, 0)] = messages
        for message in () if all(waited.values()) else [message for message, done in waited.items() if not done]:
            where = network.end(message, int(network.rank[1][message] == rank))
            wrong.append(f"{where} is never waited for: its tensor would be held for ever")
    _refuse("these events can not be run", wrong)


def _read_meeting(network: _Network, rank: int, event: Event) -> str | None:
    """Note a meeting of `rank`, unless its members are wrong."""
    if (problem := _bad_members(rank, event.peers, len(network.events))) is not None:
        return f"{network.text(rank, event.line, f'meet {event.key}')} {problem}"
    members = tuple(sorted(event.peers))
    network.meetings.setdefault(members, {}).setdefault(rank, []).append((event.key, event.line))
    return None


def _read_wait(network: _Network, rank: int, event: Event, waited: bool | None) -> str | None:
    """What is wrong with a wait. waited: whether its message was waited for before; None: the rank has not posted it."""
    if waited is False:
        return None
    problem = "that it has not posted before" if waited is None else "a second time"
    return f"{network.text(rank, event.line, f'wait {event.key}')} waits for message {event.key} {problem}"


def _misdirected(network: _Network, rank: int, event: Event) -> str | None:
    """What is wrong with the op or the peer of an event that posts an end of a message."""
    op, key, peers, line = event
    world = len(network.events)
    if op not in ("send", "recv"):
        return f"{network.text(rank, line)} has the unknown op {op!r}"
    if len(peers) != 1 or peers[0] == rank or not 0 <= peers[0] < world:
        return f"{network.text(rank, line, f'{op} {key}')} names the peers {peers}, needs one other of {world} ranks"
    return None


def _read_post(network: _Network, rank: int, event: Event, message: int, side: int) -> str | None:
    """Note where an end of a message is posted. Returns a problem if it was posted before, or if this rank posted the other."""
    ranks, lines = network.rank[side], network.line[side]
    problem = None
    if ranks[message] >= 0:
        first = network.text(ranks[message], lines[message])
        problem = f"message {event.key} has a second {event.op}: {network.text(rank, event.line)}, after {first}"
    elif network.rank[1 - side][message] == rank:
        problem = f"message {event.key} is sent and received by the same {network.text(rank, event.line)}"
    ranks[message], lines[message] = rank, event.line
    return problem


def _bad_members(rank: int, peers: tuple[int, ...], world: int) -> str | None:
    """What is wrong with the members of a meeting."""
    if rank not in peers:
        return f"meets {peers} but is no member"
    if len(set(peers)) < len(peers) or not all(0 <= peer < world for peer in peers):
        return f"meets {peers}, needs different ranks of {world}"
    return None


def _check_ends(network: _Network) -> None:
    """Every message has two ends that name each other."""
    wrong = []
    named: tuple[list[int], list[int]] = ([-1] * len(network.number), [-1] * len(network.number))
    for (source, target, end), messages in network.lanes.items():
        for message in messages:
            named[end][message] = source if end else target
    for message, key in enumerate(network.number):
        for end in (0, 1):
            rank, other_rank = network.rank[end][message], network.rank[1 - end][message]
            if rank < 0 <= other_rank:
                wrong.append(f"{network.end(message, 1 - end)}: nobody {('sends', 'receives')[end]} message {key}")
            elif named[end][message] != other_rank:
                other = network.end(message, 1 - end)
                wrong.append(f"{network.end(message, end)} names rank {named[end][message]}, but the other end is {other}")
    _refuse("these messages do not have two ends", wrong)


def _check_fifo(network: _Network) -> None:
    """The n-th message sent from one rank to another is the n-th received."""
    wrong = []
    for (source, target, end), sent in network.lanes.items():
        if end:
            continue
        received = network.lanes[source, target, 1]
        if sent != received:
            index, (out, into) = next((i, pair) for i, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1])
            wrong.append(f"queue {source} -> {target}, transfer {index}: {network.end(out, 0)} meets {network.end(into, 1)}")
    _refuse("messages are received in another order than they are sent in, so one would be taken for another", wrong)


def _check_meetings(network: _Network) -> None:
    """All members of a meeting arrive equally often, with the same keys."""
    wrong = []
    for members, arrivals in network.meetings.items():
        first = arrivals.get(members[0], [])
        for rank in members[1:]:
            other = arrivals.get(rank, [])
            for index, ((key, line), (key2, line2)) in enumerate(zip(first, other, strict=False)):
                if key != key2:
                    first_text, second_text = network.text(members[0], line, str(key)), network.text(rank, line2, str(key2))
                    texts = f"{first_text} with key {key!r}, {second_text} with key {key2!r}"
                    wrong.append(f"meeting {index} of ranks {members}: {texts}")
                    break
            else:
                if len(first) != len(other):
                    wrong.append(f"ranks {members} meet: rank {members[0]} {len(first)} times, rank {rank} {len(other)} times")
    _refuse("members of a meeting do not arrive together", wrong)


def _refuse(title: str, wrong: Sequence[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ProgramError("\n  ".join([f"{title}:", *wrong[:_SHOWN], *more]))


def _queue_lists(network: _Network) -> list[tuple[int, list[int]]]:
    """(rank, its messages in the order in which they must be transferred) for every queue of every rank."""
    if network.queues == "tag":
        return []
    if network.queues == "direction":
        return [(target if end else source, messages) for (source, target, end), messages in network.lanes.items()]
    queues: dict[tuple[int, int], list[int]] = {}
    senders, receivers = network.rank
    for rank, program in enumerate(network.programs):
        for code in program:
            if code >= 0 and not code & 1:
                message = code >> 1
                peer = -1 if network.queues == "single" else senders[message] + receivers[message] - rank
                queues.setdefault((rank, peer), []).append(message)
    return [(rank, messages) for (rank, _), messages in queues.items()]


def _run(network: _Network) -> tuple[list[int], list[int]]:
    """Run the events as far as possible. Returns how many events each rank has done, and how many conditions each message still
    lacks: that an end is posted, or that it is first in a queue.
    """
    count = len(network.number)
    missing = [2] * count
    behind = [-1] * count, [-1] * count  # the next message in the queue at the sender's, at the receiver's end
    for rank, queue in _queue_lists(network):
        if network.queues == "direction" and network.rank[1][queue[0]] == rank:
            continue  # the same messages as at the sender's end
        for ahead, message in pairwise(queue):
            behind[network.rank[1][ahead] == rank][ahead] = message
            missing[message] += 1
    waiting: dict[int, list[int]] = {}
    places = _meeting_places(network)
    arrived: dict[tuple[tuple[int, ...], int], list[int]] = {}
    reached = [0] * len(network.programs)
    todo = list(range(len(reached)))
    while todo:
        rank = todo.pop()
        program, position = network.programs[rank], reached[rank]
        end = len(program)
        while position < end:
            code = program[position]
            if code < 0:
                meeting = places[rank, position]
                present = arrived.setdefault(meeting, [])
                if len(present) < len(meeting[0]):  # this rank is not back from the meeting
                    present.append(rank)
                    if len(present) < len(meeting[0]):
                        break
                    todo.extend(other for other in present if other != rank)
            elif code & 1:
                if missing[code >> 1]:
                    waiting.setdefault(code >> 1, []).append(rank)
                    break
            else:
                complete = [code >> 1]
                while complete:
                    message = complete.pop()
                    missing[message] -= 1
                    if not missing[message]:
                        complete += [after[message] for after in behind if after[message] >= 0]
                        if message in waiting:
                            todo.extend(waiting.pop(message))
            position += 1
        reached[rank] = position
    return reached, missing


def _meeting_places(network: _Network) -> dict[tuple[int, int], tuple[tuple[int, ...], int]]:
    """For each "meet", by (rank, index of the event): its members, and how many earlier meetings these members had."""
    places = {}
    for rank, events in enumerate(network.events):
        seen: dict[tuple[int, ...], int] = {}
        if not any(code < 0 for code in network.programs[rank]):
            continue
        for position, event in enumerate(events):
            if event.op == "meet":
                members = tuple(sorted(event.peers))
                places[rank, position] = members, seen.get(members, 0)
                seen[members] = seen.get(members, 0) + 1
    return places


_Node = tuple[int, int]  # (rank, -1): the event that a rank is stuck at; (rank, message): the first message in one of its queues


@dataclass(frozen=True)
class _Wait:
    """An edge of the graph of waits: the node that it leads to, and its text."""

    to: _Node
    text: str


def _deadlock(network: _Network, reached: Sequence[int], missing: Sequence[int]) -> str:
    """The shortest cycle of waits in the stuck state, in words.

    A rank waits until the other end of its message is posted, or for the first message of a queue in which its message is. This
    first message waits for its own other end. Edges to the first message of a queue are enough, because all others wait for it.
    """
    graph = _waits(network, reached, missing)
    cycle = _shortest_cycle(graph)
    stuck = [rank for rank, events in enumerate(network.events) if reached[rank] < len(events)]
    stuck_ranks = f"{len(stuck)} of {len(reached)} ranks are stuck, queues {network.queues!r}"
    title = f"these events wait for each other for ever; {stuck_ranks}; the shortest cycle:"
    return "\n  ".join([title, *(wait.text for wait in cycle)])


def _waits(network: _Network, reached: Sequence[int], missing: Sequence[int]) -> dict[_Node, list[_Wait]]:
    """What each stuck rank, and each first message of a queue, waits for."""
    posted: list[set[int]] = [
        {code >> 1 for code in program[:n] if code >= 0} for program, n in zip(network.programs, reached, strict=True)
    ]
    first: dict[tuple[int, int], int] = {}  # (rank, message): first message of the queue that its end there is in
    for rank, queue in _queue_lists(network):
        incomplete = [message for message in queue if message in posted[rank] and missing[message]]
        first.update({(rank, message): incomplete[0] for message in incomplete})

    def of_end(message: int, end: int, waiter: str) -> list[_Wait]:
        """Why an end of a message does not let it complete."""
        rank = network.rank[end][message]
        if message not in posted[rank]:
            return [_Wait((rank, -1), f"{waiter} waits for {network.end(message, end)}")]
        head = first.get((rank, message), message)
        if head == message:
            return []
        end_of_head = int(network.rank[1][head] == rank)
        ahead = network.end(head, end_of_head)
        return [_Wait((rank, head), f"{waiter} waits for {ahead}, which is before it in a queue of rank {rank}")]

    graph: dict[_Node, list[_Wait]] = {}
    for rank, head in sorted({(rank, head) for (rank, _), head in first.items()}):
        end = int(network.rank[1][head] == rank)
        graph[rank, head] = of_end(head, 1 - end, network.end(head, end))
    places = _meeting_places(network)
    for rank, events in enumerate(network.events):
        if reached[rank] < len(events):
            op, key, _, line = events[reached[rank]]
            waiter = network.text(rank, line, f"{op} {key}")
            if op == "meet":
                graph[rank, -1] = _of_meeting(network, rank, places[rank, reached[rank]], places, reached, waiter)
            else:
                message = network.number[key]
                graph[rank, -1] = [*of_end(message, 0, waiter), *of_end(message, 1, waiter)]
    return graph


def _of_meeting(
    network: _Network,
    rank: int,
    meeting: tuple[tuple[int, ...], int],
    places: dict[tuple[int, int], tuple[tuple[int, ...], int]],
    reached: Sequence[int],
    waiter: str,
) -> list[_Wait]:
    """The members that have not arrived."""
    members, index = meeting
    waits = []
    for other in members:
        if other != rank and places.get((other, reached[other])) != meeting:
            key, line = network.meetings[members][other][index]
            waits.append(_Wait((other, -1), f"{waiter} waits for {network.text(other, line, f'meet {key}')}"))
    return waits


def _shortest_cycle(graph: dict[_Node, list[_Wait]]) -> list[_Wait]:
    """The shortest cycle, found by a breadth-first search from every node; of several, that of the lowest rank."""
    best: list[_Wait] = []
    for start in sorted(graph):
        came: dict[_Node, tuple[_Node, _Wait]] = {}
        todo = deque([start])
        while todo and start not in came:
            node = todo.popleft()
            for wait in graph[node]:
                if wait.to not in came:
                    came[wait.to] = node, wait
                    todo.append(wait.to)
        if start not in came:
            continue
        path: list[_Wait] = []
        node = start
        while not path or node != start:
            node, wait = came[node]
            path.append(wait)
        if not best or len(path) < len(best):
            best = path[::-1]
    assert best, "a stuck state has a cycle of waits"
    return best
