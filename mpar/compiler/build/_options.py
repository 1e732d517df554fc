"""Options of a compilation, with their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mpar.compiler.build._schedule import Schedule
from mpar.compiler.segment import RecomputePolicy
from mpar.hardware import REFERENCE, Hardware, hardware
from mpar.kernels import Kernels
from mpar.precision import Precision

__all__ = ["BUCKET_BYTES", "BatchShape", "CompileOptions"]

BUCKET_BYTES = 32 * 2**20  # units share a gather or reduction up to this size: above it, latency matters little beside bandwidth
BatchShape = tuple[int, ...] | Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape (B, S) of tokens and labels, or for each batch key its shape and dtype; B counts the rows of all microbatches."""


@dataclass(frozen=True)
class CompileOptions:
    """How a step is compiled, besides model, mesh and strategy; `mpar.compile_step` explains the options.

    training: if False, the program has forwards only, in evaluation mode, and keeps nothing for a backward.
    differentiable: if False, segments are compiled without a backward, they may keep state, and the x that leaves the chain is
              the result of the program, which has no loss.
    hides_inside: whether messages inside segments are hidden, which takes memory.
    """

    training: bool = True
    differentiable: bool = True
    schedule: Schedule = field(default_factory=Schedule)
    num_microbatches: int = 1
    num_slices: int = 1
    precision: Precision = field(default_factory=Precision)
    recompute: RecomputePolicy = field(default_factory=RecomputePolicy)
    bucket_bytes: int = BUCKET_BYTES
    prefetch_bytes: int | None = None
    hardware: Hardware | None = None
    kernels: Kernels | None = None
    hides_inside: bool = True

    @property
    def chosen_kernels(self) -> Kernels:
        """The choice of kernels that was asked for; without one, the best kernels for the chip of the hardware."""
        return self.kernels or Kernels(arch=self.hardware.arch if self.hardware else None)

    @property
    def hides_for(self) -> Hardware | None:
        """The hardware by whose times messages inside segments are hidden; None if nothing is known of it or it does one thing at
        a time."""
        return self.hardware if self.hardware is not None and self.hardware.overlaps and self.hides_inside else None

    @property
    def profile(self) -> Hardware:
        """The hardware for which costs are predicted: the one that was given, else a typical accelerator."""
        return self.hardware or hardware(REFERENCE)
