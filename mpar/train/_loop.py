"""The training loop of one rank: batch, step, record, checkpoint. It prints nothing; `on_step` gets a record of every step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpar.data import Batches
from mpar.errors import NumericsError
from mpar.program import Program, RankRun, Replay, State
from mpar.train._config import PlainConfig
from mpar.train._evaluation import Evaluation
from mpar.train._experts import expert_load, side_losses
from mpar.train._local_batch import local_batch
from mpar.train._metrics import StepRecord, flops_per_token, peak_memory_bytes
from mpar.train._setup import RunSetup
from mpar.train._state import Progress, check_data, fresh_state, load_state, save_state
from mpar.train._watch import Watch

__all__ = ["Rank", "run_steps", "start"]

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
    barrier: Callable[[], None]
    resolved: PlainConfig
    """The configuration as plain data, which checkpoints record."""
    evaluation: Evaluation | None = None


def start(rank: Rank, resume: Path | None) -> tuple[State, Progress]:
    """The state to begin with: that of the checkpoint `resume`, or a fresh one. Raises CheckpointError if the checkpoint was
    trained on other data.
    """
    data = rank.batches.fingerprint
    if resume is None:
        config, model = rank.setup.config, rank.setup.model
        path = None if config.model.random_init else config.model.path
        state = fresh_state(rank.program, model, rank.rank, seed=config.seed, hf_path=path, device=rank.device)
        return state, Progress(0, 0, data, config.seed)
    state, progress = load_state(rank.program, resume, rank.rank, rank.device)
    check_data(resume, progress.data, data)
    return state, progress


def run_steps(rank: Rank, state: State, progress: Progress, on_step: Callable[[StepRecord], None]) -> tuple[State, Progress]:
    """Train until step `config.steps`. Checkpoints are written as configured, and at the end.

    Raises NumericsError when the loss or the gradient norm is not finite; no checkpoint is written then.
    """
    config, watch = rank.setup.config, rank.watch
    costs = [flops_per_token(rank.setup.model, rank.batches.shape.seq_len, causal=causal) for causal in (False, True)]
    predicted, further = rank.program.predict().peak_bytes, bool(rank.setup.model.next_keys)
    positions = rank.batches.shape.batch_size * rank.batches.shape.seq_len
    while progress.step < config.steps:
        began, sent = time.perf_counter(), watch.communication_bytes
        batch = local_batch(rank.program, rank.batches, progress.step, rank.rank, rank.device, next_tokens=further)
        watch.begin_step(progress.step + 1)
        state, metrics = rank.run(state, batch)
        watch.between_steps(progress.step + 1)
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        _check_finite(progress.step + 1, loss, grad_norm, metrics["microbatch_losses"])
        progress = Progress(progress.step + 1, progress.tokens + round(float(metrics["weight"])), progress.data, progress.seed)
        elapsed, communication = time.perf_counter() - began, watch.communication_bytes - sent
        rate = positions / elapsed
        eval_loss = _evaluated(rank, state, progress.step)
        on_step(
            StepRecord(
                step=progress.step,
                loss=loss,
                grad_norm=grad_norm,
                lr=float(metrics["lr"]),
                tokens=progress.tokens,
                step_s=elapsed,
                tokens_per_s=rate,
                tokens_per_s_per_device=rate / rank.program.mesh.size,
                flops_per_s=rate * costs[0],
                flops_per_s_causal=rate * costs[1],
                predicted_memory_bytes=predicted,
                measured_memory_bytes=peak_memory_bytes(rank.device),
                communication_bytes=communication,
                eval_loss=eval_loss,
                perplexity=None if eval_loss is None else math.exp(min(eval_loss, _LARGEST_EXPONENT)),
                side_losses=side_losses(metrics),
                expert_load=expert_load(metrics),
            )
        )
        every = config.checkpoint.every
        if progress.step == config.steps or (every is not None and progress.step % every == 0):
            folder = Path(str(config.run_dir)) / "checkpoints"
            save_state(folder, rank.program, state, progress, rank.resolved, rank.rank, rank.barrier, config.checkpoint.keep)
    return state, progress


def _evaluated(rank: Rank, state: State, step: int) -> float | None:
    evaluation = rank.evaluation
    if evaluation is None or not evaluation.is_due(step, rank.setup.config.steps):
        return None
    return evaluation.loss(state, rank.rank, rank.device, rank.watch)


def _check_finite(step: int, loss: float, grad_norm: float, microbatch_losses: Tensor) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    bad = [m for m, value in enumerate(microbatch_losses.tolist()) if not math.isfinite(value)]
    if bad:
        problem = f"the loss is {loss} in step {step}, first in microbatch {bad[0]} (in {len(bad)} of {len(microbatch_losses)})"
    else:
        problem = f"the gradient norm is {grad_norm} in step {step}, while the loss is {loss} (all microbatches)"
    raise NumericsError(
        f"training stopped: {problem}. The parameters after this step are useless and were not saved; earlier checkpoints are "
        "unchanged.\nLower optimizer.lr, set optimizer.clip_norm or a longer warm-up, or look at the rows of this step; then "
        "start the same command again, which goes on from the last checkpoint."
    )
