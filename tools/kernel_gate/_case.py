"""Case: one call of a kernel as production makes it, to be compiled offline and checked on a GPU."""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tools.kernel_gate import cases

__all__ = ["Case", "Make", "all_cases", "calling"]

Make = Callable[..., Tensor]
"""`make(shape, dtype)`: an operand; without data where the call is only to be compiled, of random normal numbers on a GPU."""


@dataclass(frozen=True)
class Case:
    """`run(make)` makes operands and calls the Python function of a kernel. What this launches is recorded and compiled.

    kernels: entries of table.yaml that it launches. matrix: some of these kernels have tl.dot, and their SASS must have the
    chip's matrix instruction. tma: tiles are loaded by descriptors on Hopper. archs: the chips that it is for; empty: all.
    spill_bytes: how much may be spilled, by "arch triton-version" such as "sm_90 3.6", each with a reason in a comment.
    scalar_loads, linear_layouts, atomics: why a kernel may access memory in less than 128 bits beyond its scalars, keep `#linear`
    layouts beside matrix instructions on sm_90, or use atomics; "" where it may not.
    """

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Make], object]
    matrix: bool = False
    tma: bool = False
    archs: Sequence[str] = ()
    spill_bytes: Mapping[str, int] = field(default_factory=dict)
    scalar_loads: str = ""
    linear_layouts: str = ""
    atomics: str = ""


def all_cases() -> tuple[Case, ...]:
    """Every case of `tools/kernel_gate/cases`, file by file."""
    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    found = tuple(case for name in names for case in importlib.import_module(f"{cases.__name__}.{name}").CASES)
    twice = {case.name for case in found if sum(other.name == case.name for other in found) > 1}
    assert not twice, f"cases share a name: {sorted(twice)}"
    return found


@contextlib.contextmanager
def calling(implementation: Callable[..., Callable[..., object]]) -> Iterator[None]:
    """Let cases look up what they call by this `implementation(primitive, name)` instead of by that of `mpar.kernels`."""
    scopes = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(f"{cases.__name__}.")]
    before = [(scope, scope["implementation"]) for scope in scopes if "implementation" in scope]
    for scope, _ in before:
        scope["implementation"] = implementation
    try:
        yield
    finally:
        for scope, found in before:
            scope["implementation"] = found
