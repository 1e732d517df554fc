"""Proves that a lowered pipeline computes everything once, that operands are present when they are needed, and that it ends."""

from collections.abc import Sequence

from mpar.errors import ProgramError
from mpar.schedules._action import Action
from mpar.schedules._collector import paused_collector
from mpar.schedules._lower import Transfer
from mpar.schedules._order import Event, check_order
from mpar.schedules._places import Places, find_places

__all__ = ["verify"]

_SHOWN = 8
_FINE: Sequence[str] = ()
Lowered = Sequence[Sequence[Action | Transfer]]


def verify(lowered: Lowered, *, queues: str = "direction") -> None:
    """Check what every rank does, and that ranks do not wait for each other for ever. Linear in the number of lines.

    Each (stage, microbatch) has one F and, unless there is no backward at all, one B, or one I and one W, in this order on one
    rank. Operands from the same rank are computed before they are used; operands from other ranks are received and waited for
    before. A value is computed before it is sent. Nothing is sent or received twice, so everything received is used. Everything
    else is checked by `check_order`.

    Raises ProgramError, which lists all faults by rank and line of `lowered`; ConfigError for unknown queues.
    """
    with paused_collector():
        _verify(lowered, queues)


def _verify(lowered: Lowered, queues: str) -> None:
    places = find_places([[item for item in items if not isinstance(item, Transfer)] for items in lowered])
    wrong: list[str] = []
    carried: dict[int, int] = {}  # the value of each message, by its first end
    for rank, items in enumerate(lowered):
        state = _Rank(rank, places)
        for line, item in enumerate(items):
            problems = state.transfer(item, carried) if isinstance(item, Transfer) else state.action(item)
            if problems:
                wrong += [f"rank {rank}, line {line} ({item}) {problem}" for problem in problems]
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ProgramError("\n  ".join(["this pipeline does not compute what it should:", *wrong[:_SHOWN], *more]))
    check_order(_events(lowered), queues=queues, describe=lambda rank, line: str(lowered[rank][line]))


def _events(lowered: Lowered) -> list[list[Event]]:
    new = tuple.__new__
    peers = [(rank,) for rank in range(len(lowered))]  # _Rank has checked those of ends
    return [
        [
            new(Event, (item[0], item[1], () if item[0] == "wait" else peers[item[2]], line))
            for line, item in enumerate(items)
            if isinstance(item, Transfer)
        ]
        for items in lowered
    ]


class _Rank:
    """What a rank has computed and received at one line of its program.

    A value is numbered by the slot of its producer (stage * microbatches + microbatch): twice this number, plus 1 for a gradient.
    """

    def __init__(self, rank: int, places: Places) -> None:
        self.rank, self.places = rank, places
        self.done: set[int] = set()  # computed here
        self.ends: dict[int, Transfer] = {}  # by message: the end that this rank has posted
        self.coming: dict[int, int] = {}  # by message: the value of a receive that has not been waited for
        self.here: set[int] = set()  # values that were received and waited for, and not used yet
        self.moved: tuple[set[int], set[int]] = set(), set()  # all values received, all values sent

    def transfer(self, item: Transfer, carried: dict[int, int]) -> Sequence[str]:
        """Do one transfer: post an end of a message, or wait for it. Returns its faults."""
        op, message, peer, stage, kind, microbatch = item
        if op == "wait":
            value = self.coming.pop(message, -1)
            if value >= 0:
                self.here.add(value)
            end = self.ends.get(message, item)
            return _FINE if end[2:] == item[2:] else [f"waits for message {message}, which is {end} here"]
        stages, count, place, _ = self.places
        sends = op == "send"
        step = 1 if kind == "F" else -1
        producer = stage if sends else stage - step
        taker = producer + step
        if op not in ("send", "recv") or kind not in ("F", "B"):
            return ["is neither send, recv nor wait, of an F or a B"]
        if not (0 <= producer < stages and 0 <= taker < stages and 0 <= microbatch < count):
            return [f"is no message of {stages} stages and {count} microbatches"]
        source, target = place[producer * count + microbatch], place[taker * count + microbatch]
        value = (producer * count + microbatch) * 2 + (kind == "B")
        wrong: list[str] = []
        if source == target or (self.rank, peer) != ((source, target) if sends else (target, source)):
            wrong.append(f"names peer {peer}, the value goes from rank {source} to rank {target}")
        if sends and value not in self.done:
            wrong.append("sends what is not computed yet")
        if value in self.moved[sends]:
            wrong.append(f"{'sends' if sends else 'receives'} it a second time")
        if carried.setdefault(message, value) != value:
            wrong.append(f"is message {message}, whose other end is another value")
        self.moved[sends].add(value)
        self.ends[message] = item
        if not sends:
            self.coming[message] = value
        return wrong

    def action(self, item: Action) -> Sequence[str]:
        """Do one action. Returns its faults."""
        stage, kind, microbatch = item
        stages, count, place, _ = self.places
        slot = stage * count + microbatch
        if kind == "F":
            self.done.add(slot * 2)
            need = (slot - count) * 2 if stage else -1
        elif kind == "W":
            return _FINE
        else:
            self.done.add(slot * 2 + 1)
            need = (slot + count) * 2 + 1 if stage + 1 < stages else -1
        if need < 0:
            return _FINE
        source = place[need >> 1]
        if source == self.rank:
            return _FINE if need in self.done else ["needs what this rank computes later"]
        if need not in self.here:
            return [f"has not waited for its operand from rank {source}"]
        self.here.remove(need)
        return _FINE
