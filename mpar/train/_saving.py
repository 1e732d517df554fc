"""What a rank saves during a run, and when."""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from mpar import checkpoint
from mpar.checkpoint import Json
from mpar.errors import CheckpointError, NumericsError
from mpar.program import Program, State
from mpar.train._config import PlainConfig, TrainConfig
from mpar.train._place import Phase
from mpar.train._replicas import replica_problems, sums_of_all
from mpar.train._state import Progress
from mpar.train._watch import Watch

__all__ = ["Saving"]

_ABANDON_S = 30.0  # how long the save of an earlier step may still take after an error
_SILENT_S = 2.0  # a shorter wait needs no line on the screen
_WORTH_SAYING_S = 1.0
_SIGHT_S = 60.0  # a client of NFS may believe for so long that a new file does not exist

Agree = Callable[[list[float]], list[float]]
"""A function that gives every rank the highest of all ranks' values, one by one; all ranks call it together."""


class Saving:
    """Saves the state of this rank as `config` says, and compares replicas. All ranks make one at the same time.

    Leaving its context waits for the save under way; after an error for at most half a minute, since a checkpoint of an earlier
    step is worth that.
    Raises CheckpointError if this rank does not see what rank 0 writes.
    """

    def __init__(
        self,
        config: TrainConfig,
        resolved: PlainConfig,
        program: Program,
        rank: int,
        device: torch.device,
        agree: Agree,
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._resolved, self._program, self._rank = config.checkpoint, resolved, program, rank
        self._steps, self._agree, self._watch, self._say = config.steps, agree, watch, say
        self._stalled_s: float | None = None
        folder = Path(str(config.run_dir)) / "checkpoints"
        (number,) = agree([float(secrets.randbits(52))])
        run = f"{int(number):013x}"
        _see_one_file_system(folder / f".run_{run}", rank, agree)
        keep = checkpoint.Keep(self._config.keep, self._config.keep_every, self._config.keep_best)
        leaves = _leaves(program, rank, all_of_them=self._config.optimizer_state)
        options = checkpoint.SaveOptions(run, keep, config.timeout_s)
        self._saver = checkpoint.Saver(folder, leaves, program.mesh, rank, options, device=device)
        self._paths = list(leaves)

    def __enter__(self) -> "Saving":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._wait()
        elif issubclass(kind, Exception):
            try:
                self._saver.wait(_ABANDON_S)
            except (CheckpointError, NumericsError) as failure:
                self._say(f"the save of step {self._saver.step} failed, too: {failure}")

    def after_step(self, state: State, reached: Progress, eval_loss: float | None, *, last: bool) -> None:
        """Save if it is time to, and after the `last` step of the run, which waits until the checkpoint is on the disk.

        Raises what went wrong with the save before, and NumericsError if replicas of a shard differ.
        """
        every, replicas = self._config.every, self._config.check_replicas
        self._saver.check()
        if replicas is not None and reached.step % replicas == 0:
            self._compare_replicas(state, reached.step)
        if last or (every is not None and reached.step % every == 0):
            self._watch.enter(Phase.SAVE)
            began = time.perf_counter()
            if self._saver.step != reached.step:
                self._begin(state, reached, eval_loss)
            if last or self._config.mode == "sync":
                self._wait()
            self._stalled_s = time.perf_counter() - began
            self._watch.between_steps(reached.step)

    def stalled_s(self) -> float | None:
        """For how many seconds training has stood still to save since this was last asked; None if nothing was saved."""
        stalled_s, self._stalled_s = self._stalled_s, None
        return stalled_s

    def _begin(self, state: State, reached: Progress, eval_loss: float | None) -> None:
        before = self._saver.step if self._saver.under_way else None
        evaluated: Mapping[str, Json] = {} if eval_loss is None else {checkpoint.LOSS: eval_loss}
        extras = {**reached.as_extras(self._resolved), **evaluated}
        waited_s = self._saver.begin(reached.step, {path: state.leaves[path] for path in self._paths}, extras)
        if before is not None and waited_s >= _WORTH_SAYING_S:
            self._say(
                f"step {reached.step} waited {waited_s:.1f} s for the checkpoint of step {before}, which was being written. "
                "A larger checkpoint.every avoids that."
            )

    def _wait(self) -> None:
        self._saver.wait(_SILENT_S)
        if self._saver.under_way:
            self._say(f"writing the checkpoint of step {self._saver.step} ...")
        self._saver.wait()

    def _compare_replicas(self, state: State, step: int) -> None:
        self._watch.enter(Phase.MEET)
        sums = sums_of_all(self._program, state, self._rank, self._agree)
        self._watch.between_steps(step)
        problems = replica_problems(self._program, sums)
        if problems:
            raise NumericsError(
                f"training stopped: copies of the same values differ after step {step}:\n  "
                + "\n  ".join(problems)
                + "\nThey are equal unless memory or a device is faulty. This step was not saved; earlier ones are unchanged.\n"
                "Test the machines of these ranks, then start the same command again, which goes on from the newest checkpoint; "
                "one that was written after the comparison before this one may have the fault, too."
            )


def _see_one_file_system(mark: Path, rank: int, agree: Agree) -> None:
    """Rank 0 makes the folder `mark` for a moment; the others raise CheckpointError if it does not appear."""
    if rank == 0:
        mark.mkdir(parents=True, exist_ok=True)
    deadline, pause = time.monotonic() + _SIGHT_S, 0.001
    while not mark.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"cannot save into {mark.parent}: rank 0 made {mark.name} there, but rank {rank} sees none.\n"
                "Choose a run_dir on a file system that all ranks share."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
    agree([0.0])  # all have seen it
    if rank == 0:
        mark.rmdir()


def _leaves(program: Program, rank: int, *, all_of_them: bool) -> dict[str, checkpoint.Leaf]:
    """What this rank saves; without `all_of_them` only parameters. Of positions along pp with the same leaf, the first has it."""
    position = program.position(rank)
    earlier = {leaf.path for part in program.parts[:position] for leaf in part.state_out}
    return {
        leaf.path: (leaf.shape, leaf.spec, leaf.dtype)
        for leaf in program.parts[position].state_out
        if leaf.path not in earlier and (all_of_them or leaf.path.startswith("params."))
    }
