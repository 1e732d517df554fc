"""Worker: records launches and compiles kernels, in a process of its own that was started without TRITON_INTERPRET."""

import contextlib
import dataclasses
import functools
import io
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from mpar.errors import KernelError
from mpar.kernels.offline import Tuning, classes, kernels, tuning
from tools.kernel_gate._case import Case, all_cases
from tools.kernel_gate._checks import failures
from tools.kernel_gate._facts import Facts, read_ptxas, read_sass, read_ttgir, read_ttir
from tools.kernel_gate._unit import Unit, entry_names, record, target

__all__ = ["compile_units", "compiled_facts", "launch_table", "plan"]

CASES = functools.cache(all_cases)


def plan(arch: str, only: str) -> dict[str, Any]:
    """What is to be compiled for a chip: units, entries of the table that no unit uses, and cases that cannot be recorded."""
    units, broken, used = [], [], set()
    table = launch_table(arch)
    for case in _wanted(arch, only):
        try:
            recorded = _units(case.name, arch)
        except Exception as error:  # raised by the function that launches: it is reported, and the other cases go on
            broken.append(f"{case.name} on {arch}: {type(error).__name__}: {error}")
            continue
        names = entry_names(recorded, table)
        used |= names
        broken += _promises(case, arch, recorded, {kernel for kernel, _ in names})
        units += [{"case": case.name, "arch": arch, "key": unit.key, "hash": unit.hash} for unit in recorded]
    unused = {} if only else _by_kernel(table.keys() - used)
    matrix = [case.name for case in _wanted(arch, only) if case.matrix]
    return {"version": triton.__version__, "units": units, "unused": unused, "broken": broken, "matrix": matrix}


def compile_units(units: Sequence[Mapping[str, str]], out: str) -> list[dict[str, Any]]:
    """Compile units that have one hash, so are one kernel in several cases, and hold the kernel to the bars of each case.

    The texts that the compiler writes go to the folder `out`, unless that is "".
    """
    started = time.perf_counter()
    results = [dict(unit) | {"facts": None, "seconds": 0.0} for unit in units]
    first = units[0]
    try:
        unit = next(unit for unit in _units(first["case"], first["arch"]) if unit.key == first["key"])
        facts = compiled_facts(unit, Path(out) if out else None)
    except Exception as error:  # whatever the compiler raises is a finding about this kernel
        return [result | {"failures": [f"does not compile: {_words(error)}"]} for result in results]
    results[0]["seconds"] = time.perf_counter() - started
    for result in results:
        case = next(case for case in CASES() if case.name == result["case"])
        found = failures(facts, case, first["arch"], triton.__version__)
        result |= {"facts": dataclasses.asdict(facts), "failures": found}
    return results


def compiled_facts(unit: Unit, out: Path | None = None) -> Facts:
    """Compile a unit, and read what the compiler says about it."""
    log = io.StringIO()
    language = GluonASTSource if unit.kernel.is_gluon() else ASTSource
    source = language(unit.kernel, dict(unit.signature), dict(unit.constants), dict(unit.attributes))
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True  # Triton's cache does not keep the log of ptxas
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target(unit.arch), options=dict(unit.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    facts = Facts(shared_bytes=compiled.metadata.shared)
    facts.descriptors = sum(kind.startswith("tensordesc") for kind in map(str, unit.signature.values()))
    read_ptxas(log.getvalue(), facts)
    read_sass(sass, facts)
    read_ttgir(compiled.asm["ttgir"], compiled.metadata.num_warps, facts)
    read_ttir(compiled.asm["ttgir" if unit.kernel.is_gluon() else "ttir"], facts)  # Gluon starts with the GPU dialect
    if out is not None:
        stem = "".join(c if c.isalnum() or c in "._#" else "_" for c in f"{unit.key}_{unit.arch}_{triton.__version__}")
        out.mkdir(parents=True, exist_ok=True)
        for suffix, text in {
            "ptxas": log.getvalue(),
            "sass": sass,
            **{k: compiled.asm[k] for k in ("ttir", "ttgir", "ptx") if k in compiled.asm},
        }.items():
            (out / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    assert facts.registers, f"ptxas said nothing of registers: {log.getvalue()[:500]}"
    return facts


def _words(error: BaseException) -> str:
    """The last line of the innermost error's message that has words, not only the mark of a place in the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _promises(case: Case, arch: str, units: list[Unit], kernels: set[str]) -> list[str]:
    """Where a case says something of itself that its launches do not confirm: entries of the table, or descriptors."""
    found = []
    if not units:
        found.append(f"{case.name} on {arch}: launches nothing")
    if missing := sorted(set(case.kernels) - kernels):
        found.append(f"{case.name} on {arch}: launches {', '.join(sorted(kernels))} of table.yaml, and not {', '.join(missing)}")
    if case.tma and arch == "sm_90" and not any("tensordesc" in str(kind) for unit in units for kind in unit.signature.values()):
        found.append(f"{case.name} on {arch}: says tma, and launches no kernel with a descriptor")
    return found


def launch_table(arch: str) -> dict[tuple[str, str | None], Tuning]:
    """The entries of the table that a launch on this chip can get, by kernel and size class."""
    found = {}
    for kernel in kernels():
        for size in (*classes(kernel, arch), None):
            with contextlib.suppress(KernelError):
                found[kernel, size] = tuning(kernel, arch, size)
    return found


def _by_kernel(entries: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    classes: dict[str, list[str]] = {}
    for kernel, size in sorted(entries, key=str):
        classes.setdefault(kernel, []).append(size or "without a size")
    return {kernel: ", ".join(sizes) for kernel, sizes in classes.items()}


def _wanted(arch: str, only: str) -> list[Case]:
    return [case for case in CASES() if only in case.name and (not case.archs or arch in case.archs)]


@functools.lru_cache(maxsize=8)
def _units(case_name: str, arch: str) -> list[Unit]:
    return record(next(case for case in CASES() if case.name == case_name), arch)
