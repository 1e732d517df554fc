"""The implementations of the primitives that a program calls, in words."""

from collections.abc import Iterable

from mpar.ir import KernelUse
from mpar.kernels import ARCHITECTURES, REFERENCE, Kernels

__all__ = ["describe_kernels"]


def describe_kernels(kernels: Kernels, uses: Iterable[KernelUse]) -> str:
    """One line: the implementations of the primitives that have kernels; for a reference, why no kernel was chosen."""
    if kernels.arch is None:
        return ""
    if kernels.arch not in ARCHITECTURES:
        return f"kernels {kernels.mode}: none for {kernels.arch}, only for {', '.join(ARCHITECTURES)}; references run"
    by_name: dict[tuple[str, str], list[str]] = {}
    for use in sorted(set(uses), key=lambda use: (use.implementation == REFERENCE, use.implementation, use.primitive)):
        names = by_name.setdefault((use.implementation, use.why), [])
        names += [use.primitive] * (use.primitive not in names)
    parts = [f"{name} {', '.join(calls)}" + (f" ({why})" if why else "") for (name, why), calls in by_name.items()]
    return f"kernels {kernels.mode} {kernels.arch}: " + "; ".join(parts or ["no primitive with a kernel is called"])
