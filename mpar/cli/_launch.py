"""Starts the ranks of a job on this machine with torch's elastic launcher. If one dies, the error says where each rank was."""

import logging
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mpar import errors
from mpar.checkpoint import latest
from mpar.cli._worker import Failure, place_file, read_failure
from mpar.errors import MparError, ProgramError
from mpar.train import Job, describe_place, read_place

__all__ = ["RankFailure", "launch"]

_SHUTDOWN_S = 10  # how long a rank that was asked to stop may take before it is killed


class RankFailure(ProgramError):
    """A rank ended before its work was done; the message says where every rank was."""


def launch(job: Job, folder: Path) -> None:
    """Run all ranks of `job` until they end. Raises RankFailure, or the MparError that a rank raised."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # torch would report the same again
    size = job.program.mesh.size
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "mpar.cli._worker", str(folder))
    except ChildFailedError as error:
        raise _explain(job, folder, error.failures) from None


def _explain(job: Job, folder: Path, failures: Mapping[int, ProcessFailure]) -> MparError:
    """The error to raise: what a rank itself raised, else which ranks failed first and where every rank was."""
    size = job.program.mesh.size
    reported = [failure for rank in range(size) if (failure := read_failure(folder, rank)) is not None]
    killed = {rank: f.signal_name() for rank, f in failures.items() if f.exitcode < 0 and f.signal_name() != "SIGTERM"}
    known = min((failure for failure in reported if failure.known), key=lambda failure: failure.time, default=None)
    if known is not None and known.title != "TimeoutError" and not killed:
        kind = getattr(errors, known.title, ProgramError)  # the class of the error that the rank raised
        return kind(known.message if kind is errors.CheckpointError else f"{known.message}{_go_on(job)}")
    if killed:
        dead = set(killed)
        head = "; ".join(f"rank {rank} was killed by {signal}" for rank, signal in sorted(killed.items()))
    else:
        first = known or min(reported, key=lambda failure: failure.time, default=None)
        dead = set() if first is None else {first.rank}
        head = _headline(first, failures)
    last_places = [read_place(place_file(folder, rank)) for rank in range(size)]
    places = [describe_place(job.program_at(place), rank, place, dead=rank in dead) for rank, place in enumerate(last_places)]
    return RankFailure(f"{head}. All ranks were stopped. Each was last seen at:\n  " + "\n  ".join(places) + _go_on(job))


def _headline(first: Failure | None, failures: Mapping[int, ProcessFailure]) -> str:
    if first is not None:
        return f"rank {first.rank} failed first: {first.message.strip()}"
    return "; ".join(f"rank {rank} ended with exit code {failure.exitcode}" for rank, failure in sorted(failures.items()))


def _go_on(job: Job) -> str:
    """How to continue from the checkpoints, if there are any."""
    if latest(Path(str(job.config.run_dir)) / "checkpoints") is None:
        return ""
    return f"\nTo go on from the newest checkpoint, run the same command with run_dir={job.config.run_dir}."
