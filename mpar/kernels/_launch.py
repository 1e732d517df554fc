"""Launch: the one place where kernels are started, on a GPU or in Triton's interpreter, or recorded to be compiled offline."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mpar.errors import KernelError
from mpar.kernels._arch import ARCHITECTURES
from mpar.kernels._table import Tuning, tuning

__all__ = ["Kernel", "Launch", "Recording", "arch_of", "capturing", "describe", "interpreting", "launch", "recording", "tuned"]

INTERPRETED_ARCH = "sm_90"
"""The chip whose entries of the table kernels get in the interpreter, unless a recording names another chip."""


Grid: TypeAlias = Sequence[int] | Callable[..., Sequence[int]]
"""How many Triton programs a kernel is run as, or a function that computes this from its compile-time parameters."""


class Kernel(Protocol):
    """A jitted kernel: `kernel[grid]` starts it."""

    def __getitem__(self, grid: Grid) -> Callable[..., object]: ...


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded instead of done: the kernel with its arguments, and how it would have been started."""

    kernel: Kernel
    args: tuple[object, ...]
    constants: Mapping[str, object]
    tuning: Tuning


@dataclass
class Recording:
    """The launches that were recorded for `arch`, in order."""

    arch: str
    launches: list[Launch] = field(default_factory=list)


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextlib.contextmanager
def recording(arch: str) -> Iterator[Recording]:
    """Record what kernels called with meta tensors would launch on `arch`, so that exactly that can be compiled offline."""
    record = Recording(arch)
    token = _RECORDING.set(record)
    try:
        yield record
    finally:
        _RECORDING.reset(token)


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels (TRITON_INTERPRET=1), which works on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded on the current stream of the GPU of `x`: nothing may then wait for the host."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def arch_of(x: Tensor) -> str:
    """The chip that `x` is on, a key of ARCHITECTURES. Raises KernelError if there are no kernels for it."""
    record = _RECORDING.get()
    if record is not None:
        return record.arch
    if x.device.type == "cuda":
        return _arch_of_device(x.device.index)
    if interpreting():
        return INTERPRETED_ARCH
    raise KernelError(f"a kernel was called with a tensor on {x.device}; kernels run on CUDA devices: use the op of mpar.ops")


@functools.cache
def _arch_of_device(index: int | None) -> str:
    name = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
    if name not in ARCHITECTURES:
        raise KernelError(f"no kernels for {name} ({torch.cuda.get_device_name(index)}); there are {', '.join(ARCHITECTURES)}")
    return name


def tuned(kernel: str, x: Tensor, size: str | None = None) -> Tuning:
    """The table's entry of `kernel` for the chip of `x`."""
    return tuning(kernel, arch_of(x), size)


def launch(
    kernel: Kernel, grid: Grid, *args: object, on: Tensor, tuning: Tuning, **constants: object
) -> None:
    """Start `kernel` on the device of `on` with its arguments in order; `constants`: its compile-time parameters besides blocks.

    Products and sums may always be fused, so that bits do not depend on Triton's default, which changes with its version.
    """
    record = _RECORDING.get()
    if record is not None:
        record.launches.append(Launch(kernel, args, constants, tuning))
        return
    how = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages, "enable_fp_fusion": True}
    if on.device.type == "cuda" and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](*args, **constants, **tuning.blocks, **how)
    else:
        kernel[grid](*args, **constants, **tuning.blocks, **how)


def describe(x: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """A descriptor by which kernels load tiles of shape `block` from `x` (TMA), whose last dim is contiguous and rows aligned."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
