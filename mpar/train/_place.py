"""Where ranks were last seen, as their launcher reads it. Importing this does not load torch."""

import enum
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SLOTS", "Phase", "Place", "read_place"]

SLOTS = struct.Struct("6q")
"""A place in its file: step, line, collectives begun within it, its time in ns, bytes communicated, phase."""


class Phase(enum.IntEnum):
    """What a rank is busy with."""

    BEGIN = 0  # loading the job, the data and the state
    MEET = 1  # waiting for the other ranks, to connect or to agree
    STEP = 2
    EVALUATION = 3
    SAVE = 4
    BETWEEN = 5
    BATCH = 6  # making a batch that depends on the parameters


@dataclass(frozen=True)
class Place:
    """Where a rank was last seen.

    step:        the number of the last step that it began; 0 before it began one.
    line:        the number of an instruction in the program of the step or of the evaluation; -1 in other phases.
    collectives: how many collectives of this line had begun.
    """

    step: int
    line: int
    collectives: int
    time_ns: int
    communication_bytes: int
    phase: Phase = Phase.BETWEEN

    @property
    def evaluating(self) -> bool:
        """Whether `line` is of the program that evaluates after `step`."""
        return self.phase == Phase.EVALUATION


def read_place(path: Path) -> Place | None:
    """The place that a rank last wrote; None if it wrote none."""
    if not path.is_file() or path.stat().st_size != SLOTS.size:
        return None
    step, line, collectives, time_ns, communication_bytes, phase = SLOTS.unpack(path.read_bytes())
    return Place(step, line, collectives, time_ns, communication_bytes, Phase(phase))
