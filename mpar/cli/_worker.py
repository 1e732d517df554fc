"""One rank: loads the job and trains; rank 0 also prints and records. The launcher starts `python -m mpar.cli._worker FOLDER`.

A rank imports neither Hydra nor the compiler: the job holds the bound configuration and the compiled program.
"""

import datetime
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from mpar.cli._screen import StepProgress, say_aside
from mpar.data import Batches
from mpar.errors import MparError
from mpar.program import Hardware
from mpar.train import (
    Evaluation,
    Job,
    MetricsFile,
    Rank,
    StepRecord,
    Watch,
    describe_place,
    load_data,
    make_setup,
    num_threads,
    read_job,
    read_place,
    run_steps,
    start,
    tensorboard_writer,
)

__all__ = ["Failure", "connect", "main", "place_file", "read_failure", "work", "write_failure"]


@dataclass(frozen=True)
class Failure:
    """Why a rank stopped. known: an MparError, whose message explains it; otherwise `message` is a traceback."""

    rank: int
    title: str
    message: str
    known: bool
    time: float


def main(args: list[str]) -> int:
    """Run the job in the folder `args[0]` as the rank that the environment variables name."""
    folder = Path(args[0])
    rank, local_rank, local_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    try:
        job = read_job(folder)
        connect(job.config.device, job.config.timeout_s, local_rank)
        work(job, folder, rank, local_rank, local_size)
        dist.destroy_process_group()
    except BaseException as error:
        write_failure(folder, rank, error)
        sys.stderr.flush()
        os._exit(1)  # sys.exit would wait for threads of the backend, which may wait for a rank that is gone
    return 0


def connect(device: str, timeout_s: float, local_rank: int) -> None:
    """Join the process group that the environment variables describe."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s))


def work(job: Job, folder: Path, rank: int, local_rank: int, local_size: int) -> None:
    """Train as `rank`. Rank 0 writes config, program text and metrics into run_dir; every rank writes its place into `folder`."""
    config, program = job.config, job.program
    torch.set_num_threads(num_threads(config, local_size))
    device = torch.device(config.device, local_rank) if config.device == "cuda" else torch.device(config.device)
    run_dir = Path(str(config.run_dir))
    setup = make_setup(config)
    with Watch(place_file(folder, rank)) as watch:
        _stop_when_stuck(job, folder, rank, config.timeout_s)
        run = program.bind(device=device, counter=watch, progress=watch, execution=config.execution)
        data = load_data(setup, folder / "data")
        evaluation = _evaluation(job, data.evaluation, device, watch)
        this = Rank(setup, program, data.training, rank, device, run, watch, dist.barrier, job.resolved, evaluation)
        state, position = start(this, job.resume)
        if rank == 0:
            _write_records(job, setup.hardware, run_dir)  # after `start`, which may fail: then older records must stay
            with _Recorder(job, run_dir, position.step) as recorder:
                run_steps(this, state, position, recorder)
        else:
            run_steps(this, state, position, _ignore)


def _evaluation(job: Job, batches: Batches | None, device: torch.device, watch: Watch) -> Evaluation | None:
    """What this rank evaluates with; None if the job does not evaluate."""
    config = job.config
    if batches is None or job.evaluation is None:
        return None
    execution = "inductor" if job.config.execution == "inductor" else "eager"  # few runs do not repay recording a CUDA graph
    run = job.evaluation.bind(device=device, counter=watch, progress=watch, execution=execution)
    wanted = config.evaluation.batches or batches.steps_per_epoch
    return Evaluation(job.evaluation, run, batches, config.evaluation.every, min(wanted, batches.steps_per_epoch))


def _ignore(record: StepRecord) -> None:
    """Ranks other than 0 keep no records."""


class _Recorder:
    """Rank 0's records of steps: metrics.jsonl, event files, the progress bar."""

    def __init__(self, job: Job, run_dir: Path, step: int) -> None:
        self._file = MetricsFile(run_dir / "metrics.jsonl", step)
        self._board = tensorboard_writer(run_dir / "tensorboard") if job.config.tensorboard else None
        self._progress = StepProgress(step, job.config.steps, shown=job.config.progress)
        if job.config.tensorboard and self._board is None:
            say_aside("tensorboard is not installed, so there are no event files; metrics.jsonl has the same numbers")

    def __enter__(self) -> "_Recorder":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __call__(self, record: StepRecord) -> None:
        self._file.write(record)
        self._progress(record)
        if self._board is not None:
            for name, value in record.numbers().items():
                if name != "step":
                    self._board.add_scalar(name, value, record.step)


def _write_records(job: Job, hardware: Hardware, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(job.resolved, sort_keys=False, allow_unicode=True), encoding="utf-8")
    text = job.program.text(0, hardware)
    (run_dir / "program.txt").write_text(f"{text}\n", encoding="utf-8")


def place_file(folder: Path, rank: int) -> Path:
    """The file in which a rank keeps its place."""
    return folder / f"rank-{rank:05d}.place"


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write into `folder` why a rank ended, for its launcher."""
    known = isinstance(error, MparError)
    message = str(error) if known else "".join(traceback.format_exception(error))
    failure = Failure(rank, type(error).__name__, message, known, time.time())
    (folder / f"rank-{rank:05d}.failure").write_text(json.dumps(asdict(failure)), encoding="utf-8")


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Why a rank ended, if it wrote that into `folder`."""
    file = folder / f"rank-{rank:05d}.failure"
    return Failure(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _stop_when_stuck(job: Job, folder: Path, rank: int, timeout_s: float) -> None:
    """Start a thread that ends this process once it has waited in one collective or message for longer than `timeout_s`."""

    def watch() -> None:
        while True:
            time.sleep(min(1.0, timeout_s / 4))
            place = read_place(place_file(folder, rank))
            if place is None or place.line < 0 or time.time_ns() - place.time_ns < timeout_s * 1e9:
                continue
            program = job.program_at(place)
            if not place.collectives and program.part(rank).instructions[place.line].op != "wait":
                continue
            text = f"timeout_s={timeout_s:g} seconds are over: {describe_place(program, rank, place)}"
            failure = Failure(rank, "TimeoutError", text, True, time.time())
            (folder / f"rank-{rank:05d}.failure").write_text(json.dumps(asdict(failure)), encoding="utf-8")
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
