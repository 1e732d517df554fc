"""The training loop of one rank: batch, step, record, checkpoint. It prints nothing; `on_step` gets a record of every step."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mpar.checkpoint import Json
from mpar.data import Batches
from mpar.errors import RolloutError
from mpar.models import Trainable
from mpar.program import NO_LIMITS, Program, RankRun, Replay, State
from mpar.tasks import task_means
from mpar.train._evaluation import EvalLosses, Evaluation, HeldOutEvaluation, params_of
from mpar.train._experts import expert_load, side_losses
from mpar.train._first_tensor import first_not_finite
from mpar.train._health import Seen, judge
from mpar.train._local_batch import LocalBatches
from mpar.train._metrics import StepRecord, flops_per_token, peak_memory_bytes
from mpar.train._place import Phase
from mpar.train._saving import Saving
from mpar.train._setup import RunSetup, teacher_folder
from mpar.train._state import Progress, fresh_state, has_params, is_checkpoint, load_state
from mpar.train._stop import Stop
from mpar.train._watch import Watch

__all__ = ["Rank", "first_state", "run_steps", "start"]

_LARGEST_EXPONENT = 700.0  # math.exp of this is still a finite float


@dataclass(frozen=True)
class Rank:
    """Everything that the training loop of one rank needs."""

    setup: RunSetup
    program: Program
    batches: Batches
    rank: int
    device: torch.device
    run: RankRun | Replay
    watch: Watch
    saving: Saving
    stop: Stop
    agree: Callable[[list[float]], list[float]]
    """Called by all ranks together, gives each the highest of all ranks' values, one by one."""
    data_items: Mapping[str, Json]
    """What the batches depend on, item by item."""
    evaluation: Evaluation | HeldOutEvaluation | None = None


def start(rank: Rank, resume: Path | None, init: Path | None = None) -> tuple[State, Progress]:
    """The state to begin with: that of the checkpoint `resume`, or a fresh one. Its parameters are those in `init`, a checkpoint
    or a Hugging Face folder, if it is given. Raises CheckpointError if the checkpoint `resume` was trained on other data.
    """
    config, model, data = rank.setup.config, rank.setup.model, rank.batches.fingerprint
    hf_config = cast(Mapping[str, Json] | None, model.hf_config)
    if resume is not None:
        params_only = config.resume.state == "weights"
        state, reached = load_state(rank.program, resume, rank.rank, rank.device, params_only=params_only)
        reached = reached.go_on(resume, config.resume, data, rank.data_items)
        rank.batches.go_to(reached.data_cursor)
        return state, replace(reached, hf_config=hf_config)
    progress = Progress(0, 0, data, config.seed, data_items=rank.data_items, hf_config=hf_config)
    return first_state(rank.setup, rank.program, rank.rank, rank.device, init), progress


def first_state(setup: RunSetup, program: Program, rank: int, device: torch.device, init: Path | None) -> State:
    """What a rank of `program` begins with: parameters in `init`, a checkpoint or a Hugging Face folder, or without it those
    that the configuration names; the optimizer's state is zero."""
    config = setup.config
    model = setup.chain if isinstance(setup.chain, Trainable) else setup.model
    if init is not None and is_checkpoint(init) and list(model.parts) == [""] and has_params(model, init):
        return load_state(program, init, rank, device, params_only=True)[0]
    path = str(init) if init is not None else None if config.model.random_init else config.model.path
    teacher = teacher_folder(config.task) if config.task.learn == "gkd" else None
    return fresh_state(program, model, rank, seed=config.seed, source=path, device=device, teacher=teacher)


def run_steps(rank: Rank, state: State, progress: Progress, on_step: Callable[[StepRecord], None]) -> tuple[State, Progress]:
    """Train until step `config.steps`, or until all ranks agree to stop (`rank.stop`). Checkpoints are written as configured, and
    at the end.

    Raises NumericsError if the numbers of a step say that the run must stop (see `judge`); no checkpoint is written then. Raises
    the failure of a save, which goes on while training does, after one of the next steps, or at the end.
    """
    how = {"seed": rank.setup.config.seed, "start": progress.data_start}
    next_tokens = bool(rank.setup.model.next_keys)
    local = LocalBatches(rank.program, rank.batches, rank.rank, rank.device, next_tokens=next_tokens, **how)
    with rank.saving, local:
        return _run_steps(rank, local, state, progress, on_step)


def _run_steps(
    rank: Rank, local: LocalBatches, state: State, progress: Progress, on_step: Callable[[StepRecord], None]
) -> tuple[State, Progress]:
    config, watch, yardstick = rank.setup.config, rank.watch, _Yardstick.of(rank)
    while progress.step < config.steps:
        began, sent = time.perf_counter(), watch.communication_bytes
        position = progress.step - progress.data_start
        said = _begin_batch(rank, position, state, progress)
        batch = local.take(position, following=position + 1 if progress.step + 1 < config.steps else None)
        waited_s = time.perf_counter() - began
        watch.begin_step(progress.step + 1)
        limits = NO_LIMITS if config.on_spike == "warn" else progress.health.limits(config.spike.z)
        state, metrics = rank.run(state, batch, limits)
        seen = Seen.of(progress.step + 1, metrics)
        locate = partial(first_not_finite, rank.program, rank.rank, rank.run, state, batch, rank.agree)
        notes = judge(config, progress.health, seen, locate)
        watch.between_steps(seen.step)
        rank.batches.end(position, task_means(metrics))
        progress = progress.after(seen, config.spike.window).having_read(rank.batches)
        elapsed, communication = time.perf_counter() - began, watch.communication_bytes - sent
        record = yardstick.record(rank, progress, seen, metrics, elapsed, communication)
        evaluated = _evaluated(rank, state, progress)
        eval_loss = None if evaluated is None else evaluated.mean
        on_step(replace(_with_evaluation(record, evaluated), data_s=waited_s, notes=notes, batch_numbers=said))
        is_last = progress.step == config.steps or rank.stop.is_agreed(progress.step, watch)
        rank.saving.after_step(state, progress, eval_loss, last=is_last)
        if is_last:
            break
    return state, progress


def _begin_batch(rank: Rank, position: int, state: State, progress: Progress) -> Mapping[str, float]:
    """Make ready for a batch that depends on the parameters. If answers cannot be drawn or rewarded, the steps up to here are
    saved first: a run that goes on begins with drawing the same answers.
    """
    if rank.batches.reads_ahead:
        return {}
    params = params_of(state)
    rank.watch.enter(Phase.BATCH)
    try:
        said = rank.batches.begin(position, params)
    except RolloutError:
        if progress.step:
            rank.saving.after_step(state, progress, None, last=True)
        raise
    rank.watch.between_steps(progress.step)
    return said


@dataclass(frozen=True)
class _Yardstick:
    """What every step of a run is measured by: FLOPs of a token, counted in both ways, positions of a batch, predicted bytes."""

    flops: float
    flops_causal: float
    positions: int
    predicted_bytes: int

    @classmethod
    def of(cls, rank: Rank) -> "_Yardstick":
        shape = rank.batches.shape
        flops, causal = (flops_per_token(rank.setup.counted, shape.seq_len, causal=causal) for causal in (False, True))
        return cls(flops, causal, shape.batch_size * shape.seq_len, rank.program.predict().peak_bytes)

    def record(
        self,
        rank: Rank,
        progress: Progress,
        seen: Seen,
        metrics: Mapping[str, Tensor],
        elapsed_s: float,
        communication_bytes: int,
    ) -> StepRecord:
        """The record of a step that took `elapsed_s`, without what an evaluation adds."""
        rate = self.positions / elapsed_s
        return StepRecord(
            step=progress.step,
            loss=seen.loss,
            grad_norm=seen.grad_norm,
            lr=float(metrics["lr"]),
            tokens=progress.tokens,
            step_s=elapsed_s,
            tokens_per_s=rate,
            tokens_per_s_per_device=rate / rank.program.mesh.size,
            flops_per_s=rate * self.flops,
            flops_per_s_causal=rate * self.flops_causal,
            predicted_memory_bytes=self.predicted_bytes,
            measured_memory_bytes=peak_memory_bytes(rank.device),
            communication_bytes=communication_bytes,
            save_s=rank.saving.stalled_s(),
            side_losses=side_losses(metrics),
            task_means=task_means(metrics),
            expert_load=expert_load(metrics),
            skipped=progress.health.skipped,
            data_use=progress.data_numbers(),
        )


def _with_evaluation(record: StepRecord, found: EvalLosses | None) -> StepRecord:
    """The record with the losses of an evaluation; of several sets also that of each."""
    if found is None:
        return record
    of_set = dict(found.of_set) if len(found.of_set) > 1 else {}
    entropy = None if found.task_means else found.mean  # the loss of a task is none
    perplexity = None if entropy is None else math.exp(min(entropy, _LARGEST_EXPONENT))
    return replace(
        record, eval_loss=found.mean, perplexity=perplexity, eval_losses=of_set, eval_task_means=dict(found.task_means)
    )


def _evaluated(rank: Rank, state: State, progress: Progress) -> EvalLosses | None:
    """What an evaluation finds, if it is time for one. If answers cannot be rewarded, the steps up to here are saved first."""
    evaluation = rank.evaluation
    if evaluation is None or not evaluation.is_due(progress.step, rank.setup.config.steps):
        return None
    try:
        return evaluation.losses(state, progress.step, rank.rank, rank.device, rank.watch)
    except RolloutError:
        rank.saving.after_step(state, progress, None, last=True)
        raise
