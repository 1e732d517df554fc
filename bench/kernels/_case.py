"""Case: one call of a kernel as production makes it, to be compiled offline and checked on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Case", "Make"]

Make = Callable[..., Tensor]
"""`make(shape, dtype)`: an operand, without data where it is only to be compiled, of normal numbers on a GPU."""


@dataclass(frozen=True)
class Case:
    """`run(make)` makes operands and calls the Python function of a kernel; what it launches is recorded and compiled.

    kernels: entries of table.yaml that it launches. matrix: kernels with tl.dot, whose SASS must have the chip's matrix instruction.
    tma: whether tiles are loaded by descriptors on Hopper. archs: chips that it is for; empty: all.
    spill_bytes: what may be spilled, by "arch triton-version" such as "sm_90 3.6", each with a reason in a comment.
    scalar_loads: why loads may be narrower than 128 bits in a kernel that is bound by bandwidth, or "".
    """

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Make], object]
    matrix: bool = False
    tma: bool = False
    archs: Sequence[str] = ()
    spill_bytes: Mapping[str, int] = field(default_factory=dict)
    scalar_loads: str = ""


