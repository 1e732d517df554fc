"""One rank: loads the job and trains; rank 0 also prints and records. The launcher starts `python -m mpar.cli._worker FOLDER`.

A rank imports neither Hydra nor the compiler: the job holds the bound configuration and the compiled program.
"""

import datetime
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from mpar.cli._failures import place_file, write_failure, write_timeout
from mpar.cli._screen import StepProgress, say_aside
from mpar.cli._signals import hold_signals, ignore_signals, signals_call
from mpar.data import Batches, MalformedFile, stream_report
from mpar.errors import DataError
from mpar.parent_process import end_with_parent
from mpar.program import Hardware
from mpar.rollouts import HeldOut
from mpar.train import (
    DATA_FOLDER,
    MALFORMED_FILE,
    Evaluation,
    HeldOutEvaluation,
    Job,
    MetricsFile,
    Phase,
    Progress,
    Rank,
    Reference,
    RolloutPrograms,
    Saving,
    StepRecord,
    Stop,
    Watch,
    describe_place,
    draw_rollouts,
    load_data,
    make_setup,
    num_threads,
    read_job,
    read_place,
    run_steps,
    start,
    tensorboard_writer,
    waits_for_others,
    wandb_writer,
    with_reference,
)

__all__ = ["connect", "main", "watched", "work"]

_GRACE_S = 30.0  # so much longer than timeout_s the backend waits: the watchdog comes first, whose message says more


def main(args: list[str]) -> int:
    """Run the job in the folder `args[0]`, until the time `args[1]` if that is not empty, as the rank that the environment names.

    Returns 0, or the exit code that a signal asked for; a rank that fails leaves its reason in the folder and ends with 1.
    """
    end_with_parent(os.getppid())
    folder, deadline = Path(args[0]), float(args[1]) if args[1] else None
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        job = read_job(folder)
        with watched(job, folder, rank) as watch:
            watch.enter(Phase.MEET)
            store = dist.FileStore(str(folder / "store"), size)
            connect(job.config.device, job.config.timeout_s, local_rank, store, rank, size)
            hold_signals()  # before the ranks train, and after that, their launcher ends them
            code = work(job, folder, watch, deadline)
            ignore_signals()
        dist.destroy_process_group()
    except BaseException as error:
        write_failure(folder, rank, error)
        sys.stderr.flush()
        os._exit(1)  # sys.exit would wait for threads of the backend, which may wait for a rank that is gone
    return code


def connect(
    device: str, timeout_s: float, local_rank: int, store: dist.Store | None = None, rank: int = -1, size: int = -1
) -> None:
    """Join the process group: that of `store` as `rank` of `size`, or the one that the environment variables describe."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    patience = datetime.timedelta(seconds=timeout_s + _GRACE_S)
    backend = "nccl" if device == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=size)


@contextmanager
def watched(job: Job, folder: Path, rank: int) -> Iterator[Watch]:
    """The watch of this rank, which writes its place into `folder`. A thread ends this process if it waits for too long."""
    with Watch(place_file(folder, rank)) as watch:
        _stop_when_stuck(job, folder, rank, job.config.timeout_s)
        yield watch


def work(job: Job, folder: Path, watch: Watch, deadline: float | None) -> int:
    """Train as this rank of the process group. Returns 0, or the exit code of the signal or time limit that ended the training.

    Rank 0 writes config, program text and metrics into run_dir. deadline: when the time of the run is over, since the epoch.
    """
    config, program, rank = job.config, job.program, dist.get_rank()
    torch.set_num_threads(num_threads(config, int(os.environ["LOCAL_WORLD_SIZE"])))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if config.device == "cuda" else torch.device(config.device)
    run_dir = Path(str(config.run_dir))
    setup = make_setup(config)
    agree = _highest_of_all(device, config.timeout_s)
    stop = Stop(agree, deadline)
    with signals_call(stop.wish):
        watch.enter(Phase.MEET)
        patience_s = config.timeout_s + _GRACE_S
        run = program.bind(device=device, counter=watch, progress=watch, execution=config.execution, timeout_s=patience_s)
        saving = Saving(config, job.resolved, program, rank, device, agree, watch, say_aside if rank == 0 else _ignore)
        watch.enter(Phase.BEGIN)
        data = load_data(setup, folder / DATA_FOLDER)
        _check_same(data.fingerprint, job.fingerprint, agree, watch)
        if job.reference is not None:
            resumes = job.resume is not None
            data = with_reference(Reference(setup, job.reference, rank, device, watch, agree, job.init, resumes), data)
        held_out = draw_rollouts(setup, program, data, rank, _gather, device, RolloutPrograms(job.measure, job.scorers))
        evaluation = _evaluation(job, data.evaluation, held_out, device, watch)
        this = Rank(setup, program, data.training, rank, device, run, watch, saving, stop, agree, data.items, evaluation)
        state, position = start(this, job.resume, job.init)
        if rank == 0:
            _write_records(job, setup.hardware, run_dir)  # after `start`, which may fail: then older records must stay
            with _Recorder(job, run_dir, position, data.training) as recorder:
                _, position = run_steps(this, state, position, recorder)
        else:
            _, position = run_steps(this, state, position, _ignore)
    return 0 if position.step == config.steps else stop.code


def _check_same(data: str, prepared: str, agree: Callable[[list[float]], list[float]], watch: Watch) -> None:
    """Raise DataError unless the data are those that were prepared, and the same on all ranks, which may read other files.

    data, prepared: fingerprints.
    """
    watch.enter(Phase.MEET)
    number = float(int(hashlib.sha256(data.encode()).hexdigest()[:13], 16))  # 52 bits, which a float holds
    highest, negated_lowest = agree([number, -number])
    watch.enter(Phase.BEGIN)
    if highest != -negated_lowest:
        raise DataError(
            "cannot train: the ranks read different data. Nodes that have files of their own need the same ones, with the same "
            "tokenizer.\nCopy them from one node to all, or name a folder that all nodes share."
        )
    if data != prepared:
        raise DataError("cannot train: the data changed while the run began. Start it again once nothing writes into them.")


def _highest_of_all(device: torch.device, timeout_s: float) -> Callable[[list[float]], list[float]]:
    """A function that gives every rank the highest of all ranks' values, one by one.

    On GPUs it has a group of its own on the host, so that asking does not wait for what the GPU still has to do.
    """
    patience = datetime.timedelta(seconds=timeout_s + _GRACE_S)
    group = dist.new_group(backend="gloo", timeout=patience) if device.type == "cuda" else None

    def agree(values: list[float]) -> list[float]:
        highest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        return highest.tolist()

    return agree


def _gather(mine: object) -> list[object]:
    """What every rank has, in the order of ranks."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _evaluation(
    job: Job, sets: Mapping[str, Batches], held_out: HeldOut | None, device: torch.device, watch: Watch
) -> Evaluation | HeldOutEvaluation | None:
    """What this rank evaluates with; None if the job does not evaluate."""
    config = job.config
    if held_out is not None:
        return HeldOutEvaluation(held_out, config.evaluation.every)
    if not sets or job.evaluation is None:
        return None
    execution = "inductor" if config.execution == "inductor" else "eager"  # few runs do not repay recording a CUDA graph
    patience_s = config.timeout_s + _GRACE_S
    run = job.evaluation.bind(device=device, counter=watch, progress=watch, execution=execution, timeout_s=patience_s)
    return Evaluation(job.evaluation, run, sets, config.evaluation.every, config.evaluation.batches)


def _ignore(record: StepRecord | str) -> None:
    """Ranks other than 0 keep no records and say nothing."""


class _Recorder:
    """Rank 0's records of steps: metrics.jsonl, event files, Weights & Biases, the progress on the screen."""

    def __init__(self, job: Job, run_dir: Path, begin: Progress, batches: Batches) -> None:
        step = begin.step
        self._file, self._batches = MetricsFile(run_dir / "metrics.jsonl", step), batches
        self._malformed: MalformedFile | None = None
        if batches.steps_per_epoch is None:
            num_before = stream_report(begin.data_cursor).num_malformed if begin.data_cursor else 0
            self._malformed = MalformedFile(run_dir / MALFORMED_FILE, num_before)
        board = tensorboard_writer(run_dir / "tensorboard") if job.config.tensorboard else None
        wandb = wandb_writer(run_dir, job.resolved) if job.config.wandb else None
        self._boards = [writer for writer in (board, wandb) if writer is not None]
        self._progress = StepProgress(step, job.config.steps, shown=job.config.progress, log_every=job.config.log_every)
        if job.config.tensorboard and board is None:
            say_aside("tensorboard is not installed, so there are no event files; metrics.jsonl has the same numbers")

    def __enter__(self) -> "_Recorder":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)
        self._file.close()
        for board in self._boards:
            board.close()

    def __call__(self, record: StepRecord) -> None:
        self._file.write(record)
        if self._malformed is not None:
            self._malformed.add_new(self._batches.report)
        self._progress(record)
        for board in self._boards:
            for name, value in record.numbers().items():
                if name != "step":
                    board.add_scalar(name, value, record.step)


def _write_records(job: Job, hardware: Hardware, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(job.resolved, sort_keys=False, allow_unicode=True), encoding="utf-8")
    text = job.program.text(0, hardware)
    (run_dir / "program.txt").write_text(f"{text}\n", encoding="utf-8")


def _stop_when_stuck(job: Job, folder: Path, rank: int, timeout_s: float) -> None:
    """Start a thread that ends this process once it has waited in one collective or message for longer than `timeout_s`."""

    def watch() -> None:
        while True:
            time.sleep(min(1.0, timeout_s / 4))
            place = read_place(place_file(folder, rank))
            if place is None or time.time_ns() - place.time_ns < timeout_s * 1e9:
                continue
            program = job.program_at(place)
            if place.line < 0 and place.phase != Phase.MEET:
                continue
            if place.line >= 0 and not waits_for_others(program, rank, place):
                continue
            text = f"timeout_s={timeout_s:g} seconds are over: {describe_place(program, rank, place)}"
            write_timeout(folder, rank, text)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
