"""Metrics: one JSON object for each step in `metrics.jsonl`, event files for TensorBoard, and Weights & Biases."""

import importlib
import importlib.util
import json
import math
import resource
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from mpar.errors import ConfigError
from mpar.models import flops_per_token
from mpar.train._config import PlainConfig
from mpar.train._experts import ExpertLoad

__all__ = [
    "MetricsFile",
    "StepRecord",
    "TensorBoard",
    "flops_per_token",
    "peak_memory_bytes",
    "read_metrics",
    "tensorboard_writer",
    "wandb_writer",
]


@dataclass(frozen=True)
class StepRecord:
    """The measurements of one step.

    tokens:          labels trained on since the run began; of a task, how much it learned from, such as pairs.
    tokens_per_s:    positions of the batch, padding included, per second.
    flops_per_s:     FLOP/s of the model on all ranks together. Attention is counted over all pairs of positions, and over half of
                     them in flops_per_s_causal.
    predicted_memory_bytes: predicted peak of a rank, for the tensors of the step.
    measured_memory_bytes: measured peak of a rank. On the host it is that of the process with all libraries (VmHWM), on CUDA that
                     of the allocator.
    communication_bytes: bytes that this rank gave to collectives and sent to other stages, counted at the transport.
    save_s: for how many seconds training stood still before this step, in order to save; None: it did not.
    eval_loss, perplexity: mean loss on the data of `evaluation` after the step, and its exponential; None: not evaluated then.
    eval_losses:     of several sets to evaluate on, the mean loss on each.
    side_losses: losses that were added to `loss`, which does not include them; each is summed over layers.
    expert_load: by layer with experts.
    data_s: for how many seconds the step waited for its batch.
    data_use: the rows and tokens that all steps have been given, by source; of a stream also rows that were left out, by reason.
    batch_numbers: what there is to see of a batch that depends on the parameters, such as the mean reward of its answers.
    task_means, eval_task_means: means that the task reports, of the step and of all data to evaluate on.
    skipped: how many steps of the run so far were skipped, because loss or gradient norm were not finite or a spike.
    notes: what is wrong with the step, in words; nothing with most.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    flops_per_s: float
    flops_per_s_causal: float
    predicted_memory_bytes: int
    measured_memory_bytes: int
    communication_bytes: int
    save_s: float | None = None
    eval_loss: float | None = None
    perplexity: float | None = None
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    side_losses: Mapping[str, float] = field(default_factory=dict)
    expert_load: Mapping[str, ExpertLoad] = field(default_factory=dict)
    skipped: int = 0
    data_s: float = 0.0
    data_use: Mapping[str, float] = field(default_factory=dict)
    batch_numbers: Mapping[str, float] = field(default_factory=dict)
    task_means: Mapping[str, float] = field(default_factory=dict)
    eval_task_means: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def max_load(self) -> float:
        """The highest `max_load` of all layers with experts."""
        return max(load.max_load for load in self.expert_load.values())

    @property
    def dropped(self) -> float:
        """The share of the slots of all layers that was dropped."""
        slots = sum(load.slots for load in self.expert_load.values())
        return sum(load.dropped * load.slots for load in self.expert_load.values()) / max(slots, 1)

    def numbers(self) -> dict[str, float]:
        """All numbers that are not None, by name; those of one layer are named like `max_load/layers.3`, those of one of several
        sets to evaluate on like `eval_loss/NAME`.
        """
        mappings = ("side_losses", "eval_losses", "expert_load", "data_use", "batch_numbers", "task_means", "eval_task_means")
        names = [f.name for f in fields(self) if f.name not in (*mappings, "notes")]
        numbers = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        numbers |= {**self.side_losses, **self.data_use, **self.batch_numbers, **self.task_means}
        numbers |= {f"eval_{name}": mean for name, mean in self.eval_task_means.items()}
        numbers |= {f"eval_loss/{name}": loss for name, loss in self.eval_losses.items()}
        if self.expert_load:
            numbers |= {"max_load": self.max_load, "dropped": self.dropped}
        for layer, load in self.expert_load.items():
            numbers |= {f"{name}/{layer}": getattr(load, name) for name in ("max_load", "entropy", "dropped")}
        return numbers


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has used so far: resident on the host, or allocated on its CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    if peaks:
        return peaks[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # may be too high: a child inherits its parent's maximum


class MetricsFile:
    """The file `metrics.jsonl`. Opening it for a run that resumes after `step` drops the records of later steps, all at once.

    A number that is not finite is written as null, because JSON has no other word for it.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line, numbers in _records(path) if numbers["step"] <= step]
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append one record. It has left this process when this returns, so a killed run loses no record."""
        numbers = {name: value if math.isfinite(value) else None for name, value in record.numbers().items()}
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records in `metrics.jsonl`, in order; an empty list if there is no file. What is null in it is NaN."""
    return [{name: math.nan if value is None else value for name, value in numbers.items()} for _, numbers in _records(path)]


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of the file that are records, and what they say. A killed process may have written half of its last line, and a
    machine without power may have left zeros: what is no record is left out.
    """
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            numbers = json.loads(line)
            if isinstance(numbers, dict) and "step" in numbers:
                found.append((line, numbers))
    return found


class TensorBoard(Protocol):
    """The methods of torch's SummaryWriter that mpar uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


def tensorboard_writer(folder: Path) -> TensorBoard | None:
    """A writer of event files in `folder`; None if the optional package tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))


class _Wandb:
    """A run of Weights & Biases with the methods of a TensorBoard writer."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self._run.log({tag: scalar_value}, step=global_step)

    def close(self) -> None:
        self._run.finish()


def wandb_writer(run_dir: Path, resolved: PlainConfig) -> TensorBoard:
    """A run of Weights & Biases, whose files are in `run_dir`; a run that goes on there goes on with the same one.

    Its own environment variables say the rest: WANDB_MODE=offline, WANDB_PROJECT, WANDB_API_KEY. Raises ConfigError if the
    package is not installed or refuses to begin.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("cannot record with wandb=true: the package is not installed; pip install wandb, or mpar[track]")
    wandb, known = importlib.import_module("wandb"), run_dir / "wandb.id"
    if not known.is_file():
        known.write_text(secrets.token_hex(4), encoding="utf-8")
    try:
        return _Wandb(
            wandb.init(
                name=run_dir.name,
                id=known.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(run_dir),
                config=resolved,
                settings=wandb.Settings(console="off", silent=True),
            )
        )
    except wandb.Error as error:
        raise ConfigError(
            f"cannot record with wandb=true: {error}\nLog in with `wandb login`, or set WANDB_MODE=offline, which records here."
        ) from None
