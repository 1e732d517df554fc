"""Load: make generated code a function that calls the implementations that were chosen when the program was compiled."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from mpar import control
from mpar.kernels import implementation
from mpar.ops import PRIMITIVES
from mpar.runtime._inductor import Neighbours, apart, compiled, for_inductor
from mpar.runtime.comm import Comm

__all__ = ["Code", "load"]

CONTROL = (control.cond, control.scan, control.while_loop)
"""Functions that Inductor does not compile: it would unroll loops, and a condition is read on the host."""

Code = Callable[[list[Tensor], Comm], tuple[Tensor, ...]]
"""`code(args, comm)` takes its operands out of the list `args`, so that each is freed after its last use."""


def load(
    name: str,
    source: str,
    constants: Mapping[str, Tensor],
    device: torch.device,
    primitives: Mapping[str, Callable] | None = None,
    *,
    inductor: bool = False,
    neighbours: Neighbours = (),
) -> Code:
    """The function that generated source defines. `primitives` replaces the implementations that it calls by others, by name.
    neighbours: see `Kind`."""
    called = [name for name in PRIMITIVES if f"[{name!r}" in source]

    def defined(find: Callable[..., Callable], leave: Callable[[str, Callable], Callable]) -> Code:
        given = {name: find(name) for name in called} if primitives is None else primitives
        names: dict[str, object] = {
            "torch": torch,
            "PRIMITIVES": given,
            "KERNELS": _Kernels(given, device, find),
            "CONTROL": {fn.__name__: leave(fn.__name__, fn) for fn in CONTROL},
            "CONSTANTS": {key: value.to(device) for key, value in constants.items()},
            "DEVICE": device,
            "TO_HOST": leave("to_host", _to_host),
            "TO_DEVICE": leave("to_device", lambda x: x.to(device, non_blocking=True)),
            "inf": float("inf"),
            "nan": float("nan"),
        }
        exec(compile(source, f"<segment {name}>", "exec"), names)
        return cast(Code, names["run"])

    return (
        compiled(defined(for_inductor, apart), neighbours)
        if inductor
        else defined(implementation, lambda name, function: function)
    )


def _to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory of the host, which the device writes by itself; a tensor on the CPU is returned as it is."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class _Kernels(dict[tuple[str, str], Callable]):
    """From (primitive, implementation) to a function. On a CPU that of `primitives`, whatever the program was compiled for."""

    def __init__(self, primitives: Mapping[str, Callable], device: torch.device, find: Callable[[str, str], Callable]) -> None:
        super().__init__()
        self.primitives, self.device, self.find = primitives, device, find

    def __missing__(self, key: tuple[str, str]) -> Callable:
        function = self.find(*key) if self.device.type == "cuda" else self.primitives[key[0]]
        self[key] = function
        return function
