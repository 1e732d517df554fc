"""Job: what a launcher hands to the ranks of its node, as a file in a folder that only its owner can read."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from mpar.program import Program
from mpar.train._config import PlainConfig, TrainConfig
from mpar.train._watch import Place

__all__ = ["Job", "read_job", "write_job"]

_NAME = "job.pickle"


@dataclass(frozen=True)
class Job:
    """config: the bound configuration. resolved: the same as plain data, for the records. program: the compiled training.
    resume: the checkpoint to go on from, if any. evaluation: the program that evaluates, if the run does."""

    config: TrainConfig
    resolved: PlainConfig
    program: Program
    resume: Path | None = None
    evaluation: Program | None = None

    def program_at(self, place: Place | None) -> Program:
        """The program that a rank at `place` is running: the training or the evaluation."""
        return self.evaluation if place is not None and place.evaluating and self.evaluation is not None else self.program


def write_job(folder: Path, job: Job) -> None:
    """Write `job` into `folder`. The folder must be private, because reading a pickle can run any code."""
    (folder / _NAME).write_bytes(pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL))


def read_job(folder: Path) -> Job:
    """The job that this user's launcher wrote into `folder`."""
    return pickle.loads((folder / _NAME).read_bytes())
