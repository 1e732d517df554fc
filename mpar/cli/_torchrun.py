"""`mpar train` under torchrun. Local rank 0 starts a child process that compiles, the other ranks wait for it, then all train."""

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
    """Run as one of torchrun's ranks; returns the exit code."""
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
    config, resolved = compose_config("train", TrainConfig, arguments.overrides, arguments.user_dir)
    mesh = make_mesh(config)
    if mesh.size != world:
        raise MeshError(
            f"cannot run {mesh} of {mesh.size} ranks: torchrun started {world} processes.\n"
            f"Start {mesh.size} with torchrun --nproc-per-node (and --nnodes), or choose mesh sizes whose product is {world}."
        )
    return config, resolved


def _run(config: TrainConfig, resolved: PlainConfig, rank: int, local_rank: int, local_size: int) -> int:
    """Prepare, train, finish. Returns the exit code; errors have been printed."""
    run_dir = [config.run_dir or new_run_dir()]
    dist.broadcast_object_list(run_dir, src=0)
    config = dataclasses.replace(config, run_dir=run_dir[0])
    resolved = resolved | {"run_dir": config.run_dir}
    node_folder = Path(tempfile.mkdtemp(prefix="mpar-")) if local_rank == 0 else None
    try:
        node = int(os.environ["GROUP_RANK"])
        report = None if node_folder is None else (node, str(node_folder), _prepare(config, resolved, node_folder))
        gathered: list[tuple[int, str, tuple[str, str] | None] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, report)
        nodes = {entry[0]: entry for entry in gathered if entry is not None}
        failure = next((entry[2] for entry in nodes.values() if entry[2] is not None), None)
        if failure is not None:
            if rank == 0:
                show_failure(*failure)
            return 1
        folder = Path(nodes[node][1])
        return _train(config, folder, rank, local_rank, local_size)
    finally:
        if node_folder is not None:
            shutil.rmtree(node_folder, ignore_errors=True)


def _prepare(config: TrainConfig, resolved: PlainConfig, folder: Path) -> tuple[str, str] | None:
    """Prepare the job in `folder` with a child process. Returns the title and text of an error, or None."""
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
        if rank == 0 or not isinstance(error, NumericsError):  # all ranks see the same loss, so one of them prints this error
            show_failure(f"rank {rank}: {type(error).__name__}", str(error))
        return 1
    except RuntimeError as error:
        last_place = read_place(place_file(folder, rank))
        place = describe_place(job.program_at(last_place), rank, last_place)
        show_failure("RankFailure", f"{place}; the connection broke: {str(error).splitlines()[0]}")
        return 1
    if rank == 0:
        return subprocess.run([sys.executable, "-m", "mpar.cli._finish", str(folder)], check=False).returncode
    return 0
