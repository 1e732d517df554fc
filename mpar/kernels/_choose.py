"""Choose: which implementation carries out a call. It is decided once, when a program is compiled, by shapes, dtypes and chip."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from mpar.errors import KernelError, UnknownNameError
from mpar.kernels._arch import ARCHITECTURES
from mpar.kernels._catalogue import CATALOGUE
from mpar.ops import PRIMITIVES

__all__ = ["KERNELS", "REFERENCE", "Kernels", "choose", "implementation", "kernels_for"]

Mode = Literal["auto", "triton", "torch"]
OURS = ("triton", "gluon")
"""Names of implementations that are mpar's own kernels; the others are functions of libraries."""
REFERENCE = "reference"
"""The name of the primitive's own implementation, which is made of torch's ops."""


@dataclass(frozen=True)
class Kernels:
    """How to choose: by which rule, and for which chip.

    mode: "auto" takes the first implementation that supports the call, else the reference; "triton" takes the one called triton,
          or raises an error; "torch" is like "auto", but takes none of mpar's own kernels.
    arch: the chip; None for a CPU. On a chip for which there are no kernels, references run.
    """

    mode: Mode = "auto"
    arch: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UnknownNameError(f"no choice of kernels is called {self.mode!r}; there are {', '.join(get_args(Mode))}")
        if self.mode == "triton" and self.arch not in ARCHITECTURES:
            raise KernelError(
                f"kernels=triton was asked for on {self.arch or 'a CPU'}; there are kernels for {', '.join(ARCHITECTURES)}. "
                "Use kernels=auto, which takes the reference where there is no kernel."
            )


KERNELS = Kernels()
"""The choice where no chip is given: references everywhere."""


def choose(kernels: Kernels, primitive: str, operands: Sequence[object], params: Mapping[str, object]) -> tuple[str, str]:
    """`(implementation, why)` for a call with these operands, which need no data.

    why: for a reference, why no other implementation was taken. Raises KernelError if the mode is "triton" and no Triton kernel
    supports the call.
    """
    if kernels.arch not in ARCHITECTURES or primitive not in CATALOGUE:
        return REFERENCE, ""
    reasons = []
    for candidate in CATALOGUE[primitive]:
        if (kernels.mode == "triton" and candidate.name != "triton") or (kernels.mode == "torch" and candidate.name in OURS):
            continue
        reason = candidate.supports(kernels.arch, *operands, **params)
        if reason is None:
            return candidate.name, ""
        reasons.append(f"{candidate.name}: {reason}")
    if kernels.mode == "triton":
        raise KernelError(
            f"kernels=triton cannot carry out {primitive} on {kernels.arch}: {'; '.join(reasons)}. Use kernels=auto."
        )
    return REFERENCE, "; ".join(reasons)


def implementation(primitive: str, name: str = REFERENCE) -> Callable[..., object]:
    """The function that carries out `primitive`. Raises UnknownNameError if it has no such implementation."""
    if name == REFERENCE:
        impl = PRIMITIVES[primitive].impl
        assert impl is not None, f"primitive {primitive} has no implementation"
        return impl
    for candidate in CATALOGUE.get(primitive, ()):
        if candidate.name == name:
            return candidate.load()
    known = [REFERENCE, *(candidate.name for candidate in CATALOGUE.get(primitive, ()))]
    raise UnknownNameError(f"{primitive} has no implementation {name!r}; it has {', '.join(known)}")


def kernels_for(mode: Mode, device: torch.device | str) -> Kernels:
    """How to choose for `device`, a device of this machine: its chip is looked up."""
    device = torch.device(device)
    if device.type != "cuda":
        return Kernels(mode)
    return Kernels(mode, "sm_{}{}".format(*torch.cuda.get_device_capability(device)))
