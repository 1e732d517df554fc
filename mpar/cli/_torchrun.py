"""`mpar train` under torchrun: local rank 0 has a child process compile, the others wait, then all are ranks of one job."""

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from mpar.cli._arguments import read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._run_dir import new_run_dir
from mpar.cli._screen import say_aside, show_failure
from mpar.cli._worker import connect, place_file, read_failure, work
from mpar.errors import ConfigError, MeshError, MparError, NumericsError
from mpar.train import PlainConfig, TrainConfig, describe_place, make_mesh, read_job, read_place

__all__ = ["main"]


def main(args: Sequence[str]) -> int:
    """Be one rank; returns the exit code."""
    rank, local_rank, local_size, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    try:
        config, resolved = _configure(args, world)
    except MparError as error:
        if rank == 0:
            show_failure(type(error).__name__, str(error))
        return 1
    connect(config.device, config.timeout_s, local_rank)
    code = _run(config, resolved, rank, local_rank, local_size)
    sys.stderr.flush()
    if code:
        os._exit(code)  # a thread of the backend may wait for a rank that is gone
    dist.destroy_process_group()
    return 0


def _configure(args: Sequence[str], world: int) -> tuple[TrainConfig, PlainConfig]:
    arguments = read_arguments(args)
    if arguments.multirun:
        raise ConfigError("a sweep cannot run under torchrun: leave out -m, or start `mpar train -m` without torchrun")
    config, resolved = compose_config("train", TrainConfig, arguments.overrides, arguments.own)
    mesh = make_mesh(config)
    if mesh.size != world:
        raise MeshError(
            f"cannot run {mesh} of {mesh.size} ranks: torchrun started {world} processes.\n"
            f"Start {mesh.size} with torchrun --nproc-per-node (and --nnodes), or choose mesh sizes whose product is {world}."
        )
    return config, resolved


def _run(config: TrainConfig, resolved: PlainConfig, rank: int, local_rank: int, local_size: int) -> int:
    """Prepare, train, finish. The exit code; what went wrong is on the screen."""
    run_dir = [config.run_dir or new_run_dir()]
    dist.broadcast_object_list(run_dir, src=0)
    config = dataclasses.replace(config, run_dir=run_dir[0])
    resolved = resolved | {"run_dir": config.run_dir}
    own = Path(tempfile.mkdtemp(prefix="mpar-")) if local_rank == 0 else None
    try:
        told = None if own is None else (int(os.environ["GROUP_RANK"]), str(own), _prepare(config, resolved, own))
        gathered: list[tuple[int, str, tuple[str, str] | None] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, told)
        nodes = {entry[0]: entry for entry in gathered if entry is not None}
        bad = next((failure for _, _, failure in nodes.values() if failure is not None), None)
        if bad is not None:
            if rank == 0:
                show_failure(*bad)
            return 1
        folder = Path(nodes[int(os.environ["GROUP_RANK"])][1])
        return _train(config, folder, rank, local_rank, local_size)
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _prepare(config: TrainConfig, resolved: PlainConfig, folder: Path) -> tuple[str, str] | None:
    """Title and text of what is wrong with the input, if anything is."""
    (folder / "request.pickle").write_bytes(pickle.dumps((config, resolved)))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    code = subprocess.run([sys.executable, "-m", "mpar.cli._prepare", str(folder)], env=environment, check=False).returncode
    if code == 0:
        return None
    failure = read_failure(folder, 0)
    return ("ProgramError", f"the compiling process ended with {code}") if failure is None else (failure.title, failure.message)


def _train(config: TrainConfig, folder: Path, rank: int, local_rank: int, local_size: int) -> int:
    job = read_job(folder)
    if rank == 0:
        say_aside((folder / "summary.txt").read_text(encoding="utf-8"))
    try:
        work(job, folder, rank, local_rank, local_size)
        dist.barrier()
    except MparError as error:
        if rank == 0 or not isinstance(error, NumericsError):  # every rank sees the same loss
            show_failure(f"rank {rank}: {type(error).__name__}", str(error))
        return 1
    except RuntimeError as error:
        found = read_place(place_file(folder, rank))
        place = describe_place(job.program_at(found), rank, found)
        show_failure("RankFailure", f"{place}; the connection broke: {str(error).splitlines()[0]}")
        return 1
    if rank == 0:
        return subprocess.run([sys.executable, "-m", "mpar.cli._finish", str(folder)], check=False).returncode
    return 0
