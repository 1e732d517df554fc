"""Options of a compilation, and what a caller may leave out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mpar.compiler.build._schedule import Schedule
from mpar.compiler.segment import RecomputePolicy
from mpar.hardware import REFERENCE, Hardware, hardware
from mpar.kernels import Kernels
from mpar.precision import Precision

__all__ = ["BUCKET_BYTES", "BatchShape", "CompileOptions"]

BUCKET_BYTES = 32 * 2**20  # gathers and reductions of units are joined up to this size: beyond it, bandwidth hides latency
BatchShape = tuple[int, ...] | Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""(B, S) of tokens and labels, or for each batch key its shape and dtype; of all microbatches together."""


@dataclass(frozen=True)
class CompileOptions:
    """How a step is compiled, besides model, mesh and strategy; `mpar.compile_step` says what each means.

    training: forwards alone and in evaluation mode if False: nothing has a gradient, and nothing is kept for one.
    """

    training: bool = True
    schedule: Schedule = field(default_factory=Schedule)
    num_microbatches: int = 1
    num_slices: int = 1
    precision: Precision = field(default_factory=Precision)
    recompute: RecomputePolicy = field(default_factory=RecomputePolicy)
    bucket_bytes: int = BUCKET_BYTES
    prefetch_bytes: int = 0
    hardware: Hardware | None = None
    kernels: Kernels | None = None

    @property
    def chosen_kernels(self) -> Kernels:
        """The kernels that were asked for; else the best ones for the chip of the hardware."""
        return self.kernels or Kernels(arch=self.hardware.arch if self.hardware else None)

    @property
    def profile(self) -> Hardware:
        """Whose costs count: the hardware that was given, else a typical accelerator."""
        return self.hardware or hardware(REFERENCE)
