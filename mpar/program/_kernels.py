"""Kernels of a program: when it is compiled every call of a primitive gets its implementation, the same on every rank."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mpar.errors import ConfigError
from mpar.kernels import ARCHITECTURES, CATALOGUE, REFERENCE, REFERENCE_WORKSPACE, Kernels, choose
from mpar.ops import PRIMITIVES, primitive_of

__all__ = ["KernelUse", "asking_references", "check_device", "choose_kernels", "describe_kernels"]


@dataclass(frozen=True)
class KernelUse:
    """Calls of a primitive in one segment that have the same implementation; `why` not a better one."""

    primitive: str
    implementation: str
    why: str
    calls: int


def choose_kernels(graph: fx.Graph, kernels: Kernels) -> tuple[KernelUse, ...]:
    """Note on every node of a primitive which implementation carries it out, and what workspace that takes."""
    uses: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        primitive = primitive_of(node.target) if node.op == "call_function" else None
        if primitive is None or primitive.name not in CATALOGUE or kernels.arch not in ARCHITECTURES:
            continue
        operands, params = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        name, why = choose(kernels, primitive.name, operands, params)
        node.meta["implementation"] = name
        if name == REFERENCE and primitive.name in REFERENCE_WORKSPACE:
            node.meta["workspace"] = REFERENCE_WORKSPACE[primitive.name](*operands, **params)
        elif name != REFERENCE:
            node.meta["workspace"] = next(i for i in CATALOGUE[primitive.name] if i.name == name).workspace(*operands, **params)
        uses[primitive.name, name, why] += 1
    return tuple(KernelUse(*use, calls) for use, calls in uses.items())


def describe_kernels(kernels: Kernels, uses: Iterable[KernelUse]) -> str:
    """One line: what carries out the primitives that have kernels, and why where it is the reference."""
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
