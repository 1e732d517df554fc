"""Finds the rank of each (stage, microbatch) in a table of actions, and checks that the table does all of the work."""

from typing import NamedTuple

from mpar.errors import ProgramError
from mpar.schedules._action import Actions
from mpar.schedules._timeline import extent

__all__ = ["Places", "find_places"]

_SHOWN = 8
_NONE, _INPUT, _WHOLE = range(3)  # how much of the backward of a (stage, microbatch) was seen so far


class Places(NamedTuple):
    """rank: at index stage * microbatches + microbatch, the rank of that F. backward: whether the table has any backwards."""

    stages: int
    microbatches: int
    rank: list[int]
    backward: bool


def find_places(table: Actions) -> Places:
    """Find the rank of every F, and check that its B, or its I and W, come after it on the same rank.

    Raises ProgramError, which lists all actions that are missing, doubled, out of order or on another rank.
    """
    stages, count = extent(table)
    wrong: list[str] = []
    forwards = sum([kind for _, kind, _ in actions].count("F") for actions in table)
    if stages * count > forwards:  # checked first, so that the lists below are no longer than the table
        raise ProgramError(f"{stages} stages of {count} microbatches need {stages * count} F, the table has {forwards}")
    place = [-1] * (stages * count)
    back = [_NONE] * (stages * count)
    for rank, actions in enumerate(table):
        for stage, kind, microbatch in actions:
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
            "\n  ".join(["these actions do not do every stage of every microbatch once:", *wrong[:_SHOWN], *more])
        )
