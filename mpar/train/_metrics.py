"""Metrics: one JSON object a step in `metrics.jsonl`, event files for TensorBoard, and the FLOPs that a token costs."""

import importlib
import importlib.util
import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

import torch

from mpar.models import flops_per_token
from mpar.train._experts import ExpertLoad

__all__ = [
    "MetricsFile",
    "StepRecord",
    "TensorBoard",
    "flops_per_token",
    "peak_memory_bytes",
    "read_metrics",
    "tensorboard_writer",
]


@dataclass(frozen=True)
class StepRecord:
    """What one step came to.

    tokens:          labels trained on since the run began. tokens_per_s: positions of the batch, padding included, per second.
    flops_per_s:     of the model, all ranks together, attention counted over all pairs; the *_causal one counts half of them.
    *_memory_bytes:  peak of a rank: as predicted for the step's tensors, and as measured (host: the process with all libraries,
                     VmHWM; CUDA: the allocator's peak), which takes in what the libraries occupy.
    communication_bytes: what this rank gave to collectives and sent to other stages, counted at the transport.
    eval_loss, perplexity: mean loss on the data of `evaluation` after the step, and its exponential; None: not evaluated then.
    side_losses: what was added to the loss, each summed over layers; `loss` is without them. expert_load: of layers with experts.
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
    eval_loss: float | None = None
    perplexity: float | None = None
    side_losses: Mapping[str, float] = field(default_factory=dict)
    expert_load: Mapping[str, ExpertLoad] = field(default_factory=dict)

    @property
    def max_load(self) -> float:
        """That of the layer where it is highest."""
        return max(load.max_load for load in self.expert_load.values())

    @property
    def dropped(self) -> float:
        """The part of the slots of all layers that was dropped."""
        slots = sum(load.slots for load in self.expert_load.values())
        return sum(load.dropped * load.slots for load in self.expert_load.values()) / max(slots, 1)

    def numbers(self) -> dict[str, float]:
        """What there is, by name; what is of one layer as `max_load/layers.3`."""
        own = [f.name for f in fields(self) if f.name not in ("side_losses", "expert_load")]
        numbers = {name: getattr(self, name) for name in own if getattr(self, name) is not None} | dict(self.side_losses)
        if self.expert_load:
            numbers |= {"max_load": self.max_load, "dropped": self.dropped}
        for layer, load in self.expert_load.items():
            numbers |= {f"{name}/{layer}": getattr(load, name) for name in ("max_load", "entropy", "dropped")}
        return numbers


def peak_memory_bytes(device: torch.device) -> int:
    """The highest memory of this process so far: resident on the host, or allocated on its CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.exists() else []
    own = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    if own:
        return own[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # which begins at that of the process that started this one


class MetricsFile:
    """`metrics.jsonl`: opening it for a run that resumes after `step` drops the records behind that step."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append one record; it is on the disk when this returns, so that a killed run leaves what it had."""
        self._file.write(json.dumps(record.numbers()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more records."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records in `metrics.jsonl`, in order; none if there is no file."""
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """Complete lines: one that a killed process left half-written does not count."""
    if not path.is_file():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=False) if line.endswith("}")]


class TensorBoard(Protocol):
    """What is used of torch's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


def tensorboard_writer(folder: Path) -> TensorBoard | None:
    """A writer of event files in `folder`; None if the optional package tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
