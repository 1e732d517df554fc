"""Where each (stage, microbatch) of a table of actions is, if the table does the whole work."""

from typing import NamedTuple

from mpar.errors import ProgramError
from mpar.schedules._action import Actions
from mpar.schedules._timeline import extent

__all__ = ["Places", "find_places"]

_SHOWN = 8
_NONE, _INPUT, _WHOLE = range(3)  # how much of the backward of a (stage, microbatch) is there


class Places(NamedTuple):
    """`rank[stage * microbatches + microbatch]` is where that F is. backward: whether the table has B, or I and W, at all."""

    stages: int
    microbatches: int
    rank: list[int]
    backward: bool


def find_places(table: Actions) -> Places:
    """Find where every F is; its B, or I and W, come after it on the same rank.

    Raises ProgramError listing what is missing, too many, out of order or elsewhere.
    """
    stages, count = extent(table)
    wrong: list[str] = []
    forwards = sum([kind for _, kind, _ in own].count("F") for own in table)
    if stages * count > forwards:  # also keeps what follows in proportion to the table
        raise ProgramError(f"{stages} stages of {count} microbatches need {stages * count} F, the table has {forwards}")
    place = [-1] * (stages * count)
    back = [_NONE] * (stages * count)
    for rank, own in enumerate(table):
        for stage, kind, microbatch in own:
            slot = stage * count + microbatch
            if kind == "F":
                if place[slot] >= 0:
                    wrong.append(f"{stage}F{microbatch} is on rank {place[slot]} and again on rank {rank}")
                place[slot] = rank
                continue
            if place[slot] != rank:
                wrong.append(f"{stage}{kind}{microbatch} of rank {rank} has no {stage}F{microbatch} before it there")
            if back[slot] != (_INPUT if kind == "W" else _NONE):
                before = ("no I", "an I", "a B or W")[back[slot]]
                wrong.append(f"{stage}{kind}{microbatch} of rank {rank} comes after {before} of the same")
            back[slot] = _INPUT if kind == "I" else _WHOLE
    backward = any(back)
    wrong += [f"{slot // count}F{slot % count} is missing" for slot, rank in enumerate(place) if rank < 0]
    if backward and min(back) < _WHOLE:
        wrong += [f"{i // count}{'BW'[done]}{i % count} is missing" for i, done in enumerate(back) if done < _WHOLE]
    _refuse(wrong)
    return Places(stages, count, place, backward)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ProgramError(
            "\n  ".join(["these actions are not one pass over all stages and microbatches:", *wrong[:_SHOWN], *more])
        )
