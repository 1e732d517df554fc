"""Starts the ranks of a job on this machine and waits for them. If one dies, the error says which, and where every rank was."""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpar import errors
from mpar.cli._failures import Failure, place_file, read_failure
from mpar.cli._later import later
from mpar.cli._ranks import Ranks, oom_kills
from mpar.cli._screen import say_aside
from mpar.cli._signals import STOP_CODES, Stopped, code_name, signals_call
from mpar.errors import MparError, ProgramError
from mpar.exit_codes import TIME_OVER, code_of_signal
from mpar.train import TrainConfig, read_place

__all__ = ["RankFailure", "launch"]

_LOOK_S = 0.05
_KEYBOARD = code_of_signal(signal.SIGINT)


class RankFailure(ProgramError):
    """A rank ended before its work was done; the message says where every rank was."""


@dataclass(frozen=True)
class _End:
    """How the ranks ended. codes: exit codes by rank, of those that ended by themselves; the others were killed by the launcher.
    standing_still: ranks that were stopped by a signal then. oom_kills: how many processes the kernel killed for lack of memory.
    """

    codes: dict[int, int]
    standing_still: Sequence[int]
    oom_kills: int


def launch(config: TrainConfig, folder: Path, deadline: float | None, inherited: Sequence[int]) -> None:
    """Run all ranks of the job in `folder`, which was prepared for `config`, until they end.

    deadline: when the time of the run is over, in seconds since the epoch; None: never.
    inherited: descriptors that the ranks keep open.
    Raises Stopped once the ranks have stopped because of a signal or the deadline; RankFailure, or the MparError that a rank
    raised. No rank is left in any case.
    """
    for old in (*folder.glob("rank-*"), *folder.glob("store")):  # of ranks that were started before
        old.unlink()
    temp = folder / "temp"  # libraries may leave something there, as wandb does when it is killed; it is deleted with the folder
    temp.mkdir(mode=0o700, exist_ok=True)
    killed_before = oom_kills()
    wishes: list[int] = []
    size = math.prod(asdict(config.mesh).values())
    with signals_call(wishes.append):
        ranks = Ranks(size, (str(folder), "" if deadline is None else repr(deadline)), inherited, temp)
        try:
            codes = _wait(size, folder, ranks, wishes, deadline)
            standing_still = ranks.standing_still()
        finally:
            ranks.kill()
    if any(code not in (0, *STOP_CODES) for code in codes.values()):
        raise _explain(size, folder, _End(codes, standing_still, oom_kills() - killed_before))
    stopped = next((code for code in codes.values() if code), 0)
    if stopped:
        raise Stopped(stopped)
    if wishes:
        raise Stopped(wishes[0], f"stopped by {code_name(wishes[0])} after the last step")


def _wait(size: int, folder: Path, ranks: Ranks, wishes: list[int], deadline: float | None) -> dict[int, int]:
    """Wait until all ranks have ended, or one of them with an error; returns the exit codes so far.

    wishes: grows by the exit code that a signal asks for. Ranks that train get the signal, and agree on a last step. Raises
    Stopped if no rank has begun a step, or if the keyboard has asked twice.
    """
    told = False
    while True:
        codes = ranks.ended()
        asked = wishes[0] if wishes else TIME_OVER if deadline is not None and time.time() >= deadline else 0
        if asked and not told:
            if not _has_begun(folder, size):
                raise Stopped(asked)
            told = True
            if asked != TIME_OVER:  # the ranks know the deadline
                ranks.tell(asked - 128)
                say_aside(f"{code_name(asked)}: finishing this step and saving it (Ctrl-C again: stop at once)", terminal=True)
        if wishes.count(_KEYBOARD) > 1:
            raise Stopped(_KEYBOARD, "stopped at once, without saving")
        if len(codes) == size or any(code not in (0, *STOP_CODES) for code in codes.values()):
            return codes
        time.sleep(_LOOK_S)


def _has_begun(folder: Path, size: int) -> bool:
    """Whether a rank has begun a step."""
    places = [read_place(place_file(folder, rank)) for rank in range(size)]
    return any(place is not None and place.step > 0 for place in places)


def _explain(size: int, folder: Path, end: _End) -> MparError:
    """The error to raise: what a rank itself raised, else which ranks failed first and where every rank was."""
    reported = [failure for rank in range(size) if (failure := read_failure(folder, rank)) is not None]
    killed = {rank: signal.Signals(-code).name for rank, code in end.codes.items() if code < 0}
    known = min((failure for failure in reported if failure.known), key=lambda failure: failure.time, default=None)
    if known is not None and known.title != "TimeoutError" and not killed:
        kind = getattr(errors, known.title, ProgramError)  # the class of the error that the rank raised
        return kind(known.message)
    if killed:
        dead = set(killed)
        head = "; ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(killed.items()))
        if end.oom_kills > 0 and "SIGKILL" in killed.values():
            head += f" (the kernel has killed {end.oom_kills} for lack of memory)"
    else:
        first = known or min(reported, key=lambda failure: failure.time, default=None)
        dead = set() if first is None else {first.rank}
        head = _headline(first, end.codes)
    if end.standing_still:
        still = ", ".join(f"rank {rank}" for rank in end.standing_still)
        head = f"{still} stood still, stopped by SIGSTOP or a debugger; {head}"
    seen = "\n  ".join(_places(folder, size, dead))
    return RankFailure(f"{head}. All ranks were stopped. Each was last seen at:\n  {seen}")


def _places(folder: Path, size: int, dead: set[int]) -> list[str]:
    """Where each rank was last seen, in words."""
    train = later("mpar.train")
    job, places = train.read_job(folder), [read_place(place_file(folder, rank)) for rank in range(size)]
    return [train.describe_place(job.program_at(place), rank, place, dead=rank in dead) for rank, place in enumerate(places)]


def _headline(first: Failure | None, codes: dict[int, int]) -> str:
    if first is not None:
        return f"rank {first.rank} failed first: {first.message.strip()}"
    return "; ".join(f"rank {rank} ended with exit code {code}" for rank, code in sorted(codes.items()) if code)
