"""What a rank's device can run: the chip that kernels were chosen for, and code that never asks the host."""

import torch

from mpar.errors import ConfigError
from mpar.kernels import ARCHITECTURES, REFERENCE, Kernels
from mpar.ops import PRIMITIVES

__all__ = ["asking_references", "check_device"]


def asking_references(source: str) -> list[str]:
    """Primitives whose references generated code calls and which ask for data on the host, which waits for the device."""
    asking = (name for name, primitive in PRIMITIVES.items() if primitive.asks_host)
    return [name for name in asking if f"PRIMITIVES[{name!r}]" in source or f"KERNELS[{name!r}, {REFERENCE!r}]" in source]


def check_device(kernels: Kernels, device: torch.device) -> None:
    """Raise ConfigError unless code that was made for `kernels` runs on `device`: on a CPU it always does, by the references."""
    if device.type != "cuda" or kernels.arch not in ARCHITECTURES:
        return
    here = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if here != kernels.arch:
        raise ConfigError(
            f"cannot run on {device} ({torch.cuda.get_device_name(device)}, {here}): the program was compiled with kernels for "
            f"{kernels.arch}. Compile it with kernels for {here}, or with kernels=torch."
        )
