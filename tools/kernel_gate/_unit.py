"""Unit: one compilation: a kernel with the types of its arguments, its constants and options, as Triton's JIT makes them."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITCallable, JITFunction, create_function_from_signature

from mpar.kernels import ARCHITECTURES
from mpar.kernels.offline import Launch, Tuning, recording
from tools.kernel_gate._case import Case

__all__ = ["Unit", "entry_names", "record", "specialise", "target"]


@dataclass(frozen=True)
class Unit:
    """What `triton.compile` takes for one kernel of a case on a chip.

    key: its name in the ledger. hash: a hash of everything that the compilation depends on.
    """

    key: str
    arch: str
    kernel: JITFunction
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    tuning: Tuning
    hash: str


def target(arch: str) -> GPUTarget:
    """Triton's name of a chip of `mpar.kernels.ARCHITECTURES`."""
    major, minor = ARCHITECTURES[arch].capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def record(case: Case, arch: str) -> list[Unit]:
    """The units that `case` needs on `arch`, in the order of their launches, each once."""

    def make(shape: Any, dtype: torch.dtype = torch.bfloat16, **_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recording(arch) as record:
        case.run(make)
    units: dict[str, Unit] = {}
    names: dict[str, int] = {}
    for launch in record.launches:
        name = launch.kernel.fn.__name__
        unit = specialise(launch, arch, f"{case.name}/{name}")
        if unit.hash in units:
            continue
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            unit = specialise(launch, arch, f"{case.name}/{name}#{names[name]}")
        units[unit.hash] = unit
    return list(units.values())


def specialise(launch: Launch, arch: str, key: str) -> Unit:
    """Bind the arguments of a launch by the JIT's own binder, which takes tensors without data to be aligned."""
    kernel, backend = launch.kernel, make_backend(target(arch))
    options = {"num_warps": launch.tuning.num_warps, "num_stages": launch.tuning.num_stages, "enable_fp_fusion": True}
    keywords = {**launch.constants, **launch.tuning.blocks}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = binder(*launch.args, **keywords, **options)
    _, signature, constants, attributes = kernel._pack_args(backend, keywords | options, bound, specialization, None)
    facts = (_source(kernel), signature, constants, attributes, options)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Unit(key, arch, kernel, signature, constants, attributes, options, launch.tuning, digest)


def entry_names(units: list[Unit], table: Mapping[tuple[str, str | None], Tuning]) -> set[tuple[str, str | None]]:
    """The entries of the table, by (kernel, size class), that these units were launched with."""
    return {name for name, entry in table.items() for unit in units if unit.tuning is entry}


def _source(kernel: Any) -> str:
    """The code of a kernel, of functions that it calls and constants that it reads, without comments and line numbers."""
    seen: dict[str, str] = {}
    _collect(kernel, seen)
    return f"{triton.__version__}\n" + "\n".join(f"{name}:\n{seen[name]}" for name in sorted(seen))


def _collect(kernel: JITCallable, seen: dict[str, str]) -> None:
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if name in seen:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    seen[name] = ast.unparse(tree)
    scope = kernel.fn.__globals__
    for node in ast.walk(tree):
        value = _value(node, scope)
        if isinstance(value, JITCallable):
            _collect(value, seen)
        elif isinstance(node, ast.Name) and isinstance(value, triton.language.constexpr):
            seen[f"{name} {node.id}"] = repr(value.value)


def _value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, scope)
        name = getattr(owner, "__name__", "")
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) and not name.startswith("triton") else None
    return None
