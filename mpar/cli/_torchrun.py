"""`mpar train` under torchrun. Local rank 0 starts a child process that compiles, the other ranks wait for it, then all train."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
import yaml

from mpar.cli._arguments import read_arguments
from mpar.cli._failures import place_file, read_failure
from mpar.cli._go_on import after_stop
from mpar.cli._job_folder import job_folder
from mpar.cli._run_lock import locked_run_dir
from mpar.cli._run_problems import compose_run, run_problems
from mpar.cli._screen import say_aside, show_failure
from mpar.cli._signals import code_name
from mpar.cli._start import REQUEST
from mpar.cli._worker import connect, watched, work
from mpar.errors import ConfigError, MeshError, MparError, NumericsError, exit_code
from mpar.parent_process import end_with_parent
from mpar.program import exchange
from mpar.train import PlainConfig, PlainValue, TrainConfig, deadline_after, describe_place, make_mesh, read_job, read_place

__all__ = ["main"]

_MOMENT_S = 1.0


def main(args: Sequence[str]) -> int:
    """Run as one of torchrun's ranks; returns the exit code."""
    end_with_parent(os.getppid())
    rank, local_rank, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    try:
        config, resolved = _configure(args, world)
        deadline = deadline_after(config.time_limit)
    except MparError as error:
        if rank == 0:
            show_failure(type(error).__name__, str(error))
        return exit_code(error)
    connect(config.device, config.timeout_s, local_rank)
    code = _run(config, resolved, rank, local_rank, deadline)
    sys.stderr.flush()
    if code:
        os._exit(code)  # a thread of the backend may wait for a rank that is gone
    dist.destroy_process_group()
    return 0


def _configure(args: Sequence[str], world: int) -> tuple[TrainConfig, PlainConfig]:
    arguments = read_arguments(args)
    if arguments.multirun:
        raise ConfigError("a sweep cannot run under torchrun: leave out -m, or start `mpar train -m` without torchrun")
    config, resolved = compose_run(arguments.overrides, arguments.user_dir, run_problems)
    mesh = make_mesh(config.mesh)
    if mesh.size != world:
        raise MeshError(
            f"cannot run {mesh} of {mesh.size} ranks: torchrun started {world} processes.\n"
            f"Start {mesh.size} with torchrun --nproc-per-node (and --nnodes), or choose mesh sizes whose product is {world}."
        )
    return config, resolved


def _run(config: TrainConfig, resolved: PlainConfig, rank: int, local_rank: int, deadline: float | None) -> int:
    """Prepare, train, finish. Returns the exit code; errors have been printed."""
    with ExitStack() as stack:
        try:
            run_dir = _lock(config.run_dir, stack) if rank == 0 else None
            run_dir = exchange(run_dir)[0]
            if run_dir is None:
                return 1
            config, resolved = dataclasses.replace(config, run_dir=run_dir), resolved | {"run_dir": run_dir}
            folder = _prepare(resolved, rank, local_rank, stack)
        except RuntimeError as error:
            show_failure("RankFailure", f"rank {rank}, preparing; the connection broke: {str(error).splitlines()[0]}")
            return 1
        return 1 if folder is None else _train(config, folder, rank, deadline)


def _prepare(resolved: PlainConfig, rank: int, local_rank: int, stack: ExitStack) -> Path | None:
    """Prepare the job on every node. Returns the folder that holds it on this one, until `stack` is closed; None, after the error
    was printed, if there is one.
    """
    folder = stack.enter_context(job_folder()) if local_rank == 0 else None
    child = None if folder is None else stack.enter_context(_preparing(resolved, folder))
    node = int(os.environ["GROUP_RANK"])
    while True:  # so no rank waits long for another one, however long preparing takes
        report: PlainValue = None
        if folder is not None and child is not None:
            report = [node, str(folder), _outcome(child, folder)]
        nodes = {entry[0]: entry for entry in exchange(report) if entry is not None}
        failure = next((outcome for _, _, outcome in nodes.values() if outcome), None)
        if failure is not None or all(outcome is not None for _, _, outcome in nodes.values()):
            break
    if failure is None:
        return Path(nodes[node][1])
    if rank == 0:
        show_failure(*failure)
    return None


def _lock(wanted: str | None, stack: ExitStack) -> str | None:
    """The folder of the run, locked until `stack` is closed; None, after the error was printed, if it cannot be locked."""
    try:
        return str(stack.enter_context(locked_run_dir(wanted))[0])
    except ConfigError as error:
        show_failure(type(error).__name__, str(error))
        return None


@contextmanager
def _preparing(resolved: PlainConfig, folder: Path) -> Iterator[subprocess.Popen]:
    """A child process that prepares the job in `folder`. It does not outlive this context."""
    (folder / REQUEST).write_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    with subprocess.Popen([sys.executable, "-m", "mpar.cli._start", str(folder)], env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def _outcome(child: subprocess.Popen, folder: Path) -> PlainValue:
    """Wait for a moment. Returns None if the child is not done yet, an empty list if it is, or title and text of an error."""
    try:
        code = child.wait(_MOMENT_S)
    except subprocess.TimeoutExpired:
        return None
    if code == 0:
        return []
    failure = read_failure(folder, 0)
    return ["ProgramError", f"the compiling process ended with {code}"] if failure is None else [failure.title, failure.message]


def _train(config: TrainConfig, folder: Path, rank: int, deadline: float | None) -> int:
    job = read_job(folder)
    if rank == 0:
        say_aside((folder / "summary.txt").read_text(encoding="utf-8"))
    try:
        with watched(job, folder, rank) as watch:
            code = work(job, folder, watch, deadline)
        dist.barrier()
    except MparError as error:
        if rank == 0 or not isinstance(error, NumericsError):  # all ranks see the same loss, so one of them prints this error
            show_failure(f"rank {rank}: {type(error).__name__}", str(error))
        return 1
    except RuntimeError as error:
        last_place = read_place(place_file(folder, rank))
        place = describe_place(job.program_at(last_place), rank, last_place)
        show_failure("RankFailure", f"{place}; the connection broke: {str(error).splitlines()[0]}")
        return 1
    if rank != 0:
        return code
    if code:
        say_aside(f"stopped by {code_name(code)}; {after_stop(config)}")
        return code
    return subprocess.run([sys.executable, "-m", "mpar.cli._finish", str(folder)], check=False).returncode
