"""What ranks leave for their launcher in the folder of their job: their places, and why they failed."""

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from mpar.errors import MparError

__all__ = ["Failure", "place_file", "read_failure", "write_failure", "write_timeout"]


@dataclass(frozen=True)
class Failure:
    """Why a rank stopped. known: an MparError, whose message explains it; otherwise `message` is a traceback."""

    rank: int
    title: str
    message: str
    known: bool
    time: float


def place_file(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps its place."""
    return folder / f"rank-{rank:05d}.place"


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write into `folder` why a rank ended, for its launcher."""
    known = isinstance(error, MparError)
    message = str(error) if known else "".join(traceback.format_exception(error))
    failure = Failure(rank, type(error).__name__, message, known, time.time())
    _write(folder, failure)


def write_timeout(folder: Path, rank: int, text: str) -> None:
    """Write into `folder` that a rank has waited for too long, and where."""
    _write(folder, Failure(rank, "TimeoutError", text, True, time.time()))


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Why a rank ended, if it wrote that into `folder`."""
    file = folder / f"rank-{rank:05d}.failure"
    return Failure(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _write(folder: Path, failure: Failure) -> None:
    (folder / f"rank-{failure.rank:05d}.failure").write_text(json.dumps(asdict(failure)), encoding="utf-8")
