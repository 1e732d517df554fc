"""Checks of what a rank's device can run: kernels for its chip, and code that does not read data on the host."""

import torch

from mpar.errors import ConfigError
from mpar.kernels import ARCHITECTURES, REFERENCE, Kernels
from mpar.ops import PRIMITIVES

__all__ = ["asking_references", "check_device"]


def asking_references(source: str) -> list[str]:
    """The primitives whose references generated code calls and that read data on the host, which then waits for the device; and
    control flow that does."""
    candidates = (name for name, primitive in PRIMITIVES.items() if primitive.asks_host)
    asking = [name for name in candidates if f"PRIMITIVES[{name!r}]" in source or f"KERNELS[{name!r}, {REFERENCE!r}]" in source]
    return [*asking, *(name for name in ("cond", "while_loop") if f"CONTROL[{name!r}]" in source)]


def check_device(kernels: Kernels, device: torch.device) -> None:
    """Raise ConfigError unless code compiled for `kernels` runs on `device`. On a CPU it always does, with references."""
    if device.type != "cuda" or kernels.arch not in ARCHITECTURES:
        return
    chip = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if chip != kernels.arch:
        raise ConfigError(
            f"cannot run on {device} ({torch.cuda.get_device_name(device)}, {chip}): the program was compiled with kernels for "
            f"{kernels.arch}. Compile it with kernels for {chip}, or with kernels=torch."
        )
