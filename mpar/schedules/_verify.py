"""Proof that a lowered pipeline computes everything once, from operands that are there, and comes to an end."""

from collections.abc import Sequence

from mpar.errors import ProgramError
from mpar.schedules._action import Action
from mpar.schedules._lower import Transfer
from mpar.schedules._order import Event, check_order
from mpar.schedules._places import Places, find_places

__all__ = ["verify"]

_SHOWN = 8
Lowered = Sequence[Sequence[Action | Transfer]]


def verify(lowered: Lowered, *, queues: str = "direction") -> None:
    """Check what every rank does, and that they do not wait for each other for ever. Linear in the number of instructions.

    Each (stage, microbatch) has one F and, unless nothing has a backward, one B or one I and one W, in this order on one rank.
    What an action needs of the same rank is computed before it; what it needs of another is received and waited for before it.
    What is sent is computed before. What is received is used, once. For the rest see `check_order`.

    Raises ProgramError listing what is wrong, by rank and line of `lowered`; ConfigError for unknown queues.
    """
    places = find_places([[item for item in own if not isinstance(item, Transfer)] for own in lowered])
    wrong: list[str] = []
    carried: dict[int, int] = {}
    for rank, own in enumerate(lowered):
        _check_rank(rank, own, places, carried, wrong)
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ProgramError("\n  ".join(["this pipeline does not compute what it should:", *wrong[:_SHOWN], *more]))
    check_order(_events(lowered), queues=queues, describe=lambda rank, line: str(lowered[rank][line]))


def _events(lowered: Lowered) -> list[list[Event]]:
    new = tuple.__new__
    return [
        [new(Event, (item.op, item.message, (item.peer,), line)) for line, item in enumerate(own) if isinstance(item, Transfer)]
        for own in lowered
    ]


def _check_rank(rank: int, own: Sequence[Action | Transfer], places: Places, carried: dict[int, int], wrong: list[str]) -> None:
    """Walk over the instructions of a rank. `carried`: what each message is, by its first end. Adds to `carried` and `wrong`.

    A value is the slot of its producer, times two; plus one for a gradient.
    """
    stages, count, place, _ = places
    top = stages - 1
    done: set[int] = set()
    ends: dict[int, Transfer] = {}  # message: its end here
    posted: dict[int, int] = {}  # message: value, of receives
    here: set[int] = set()  # received and waited for, not used
    moved: set[tuple[bool, int]] = set()
    for line, item in enumerate(own):
        if isinstance(item, Transfer):
            op, message, peer, stage, kind, microbatch = item
            if op == "wait":
                end = ends.get(message, item)
                if end[2:] != item[2:]:
                    wrong.append(f"rank {rank}, line {line} ({item}) waits for message {message}, which is {end} here")
                if message in posted:
                    here.add(posted.pop(message))
                continue
            sends, forward = op == "send", kind == "F"
            producer = stage if sends else stage - 1 if forward else stage + 1
            taker = producer + 1 if forward else producer - 1
            if kind not in ("F", "B") or not (0 <= producer <= top and 0 <= taker <= top and 0 <= microbatch < count):
                wrong.append(f"rank {rank}, line {line} ({item}): {stages} stages of {count} microbatches have no such message")
                continue
            value = (producer * count + microbatch) * 2 + (not forward)
            other = place[(taker if sends else producer) * count + microbatch]
            if not 0 <= peer == other != rank or place[stage * count + microbatch] != rank:
                ends = f"rank {place[producer * count + microbatch]} to rank {place[taker * count + microbatch]}"
                wrong.append(f"rank {rank}, line {line} ({item}) names peer {peer}, the value goes from {ends}")
            if sends and value not in done:
                wrong.append(f"rank {rank}, line {line} ({item}) sends what is not computed yet")
            if (sends, value) in moved:
                wrong.append(f"rank {rank}, line {line} ({item}) {'sends' if sends else 'receives'} it a second time")
            moved.add((sends, value))
            ends[message] = item
            if carried.setdefault(message, value) != value:
                wrong.append(f"rank {rank}, line {line} ({item}): the other end of message {message} is another value")
            if not sends:
                posted[message] = value
            continue
        stage, kind, microbatch = item
        slot = stage * count + microbatch
        if kind == "W":
            continue
        need = -1
        if kind == "F":
            done.add(slot * 2)
            if stage:
                need = (slot - count) * 2
        else:
            done.add(slot * 2 + 1)
            if stage < top:
                need = (slot + count) * 2 + 1
        if need < 0:
            continue
        if place[need >> 1] == rank:
            if need not in done:
                wrong.append(f"rank {rank}, line {line} ({item}) needs what this rank computes later")
        elif need in here:
            here.remove(need)
        else:
            wrong.append(f"rank {rank}, line {line} ({item}) has not waited for its operand of rank {place[need >> 1]}")
    for value in (*here, *posted.values()):
        stage, microbatch = divmod(value >> 1, count)
        wrong.append(f"rank {rank} receives {'FB'[value & 1]} of stage {stage}, microbatch {microbatch} and does not use it")
