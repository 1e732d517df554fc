"""Checks: bars that a compiled kernel must hold on every chip and with every version of Triton."""

from collections.abc import Mapping
from typing import Any

from mpar.kernels import ARCHITECTURES
from tools.kernel_gate._case import Case
from tools.kernel_gate._facts import Facts

__all__ = ["MORE_REGISTERS", "failures", "ledger_failures"]

MORE_REGISTERS = 16
"""A kernel that needs this many more registers than the ledger says has changed in a way that somebody must look at."""

MATRIX = {"sm_80": ("HMMA", "IMMA"), "sm_90": ("HGMMA", "QGMMA"), "sm_100": ("UTCHMMA", "UTCQMMA", "UTCMMA", "UTCOMMA")}


def failures(facts: Facts, case: Case, arch: str, version: str) -> list[str]:
    """What is wrong with a compiled kernel of `case`: one line for each finding, with the figure and its limit."""
    found = []
    short = ".".join(version.split(".")[:2])
    spill_limit = case.spill_bytes.get(f"{arch} {short}", 0)
    shared_limit = ARCHITECTURES[arch].shared_bytes
    if facts.spill_bytes > spill_limit:
        found.append(f"spills {facts.spill_bytes} bytes, limit {spill_limit}")
    if facts.local and not spill_limit:
        found.append(f"{facts.local} LDL/STL, limit 0")
    if facts.shared_bytes > shared_limit:
        found.append(f"{facts.shared_bytes} bytes of shared memory, limit {shared_limit}")
    if facts.atomics and not case.atomics:
        found.append(f"{facts.atomics} RED/ATOMG, limit 0: sums whose order changes")
    return found + (_matrix_failures(facts, case, arch) if facts.dots else _bandwidth_failures(facts, case))


def _matrix_failures(facts: Facts, case: Case, arch: str) -> list[str]:
    found = []
    units = sum(facts.matrix.get(name, 0) for name in MATRIX[arch])
    if facts.narrow_dots and not units:
        found.append(f"0 {'/'.join(MATRIX[arch])}, limit 1: the matrix unit is not used ({facts.matrix or 'none at all'})")
    if arch != "sm_80" and facts.narrow_dots and facts.matrix.get("HMMA"):
        found.append(f"{facts.matrix['HMMA']} HMMA, limit 0: matrix instructions of an older chip")
    if arch == "sm_90":
        if facts.descriptors and not facts.tma_loads:
            found.append("0 UTMALDG, limit 1: its descriptors are not used")
        if facts.serialized:
            found.append(f"{len(facts.serialized)} warnings of ptxas, limit 0: {facts.serialized[0]}")
        if facts.linear and not case.linear_layouts:
            found.append(f"{facts.linear} #ttg.linear, limit 0: Triton 3.4 to 3.7 miscompile a transposed result as an operand")
    return found


def _bandwidth_failures(facts: Facts, case: Case) -> list[str]:
    count = sum(facts.narrow.values())
    if count <= facts.scalars or case.scalar_loads:
        return []
    return [f"{count} accesses under 128 bits, limit {facts.scalars} for its scalars: {facts.narrow}"]


def ledger_failures(facts: Facts, recorded: Mapping[str, Any] | None) -> list[str]:
    """A line if the kernel needs many more registers than the ledger has for the same kernel, chip and version of Triton."""
    if recorded is None or facts.registers < recorded["registers"] + MORE_REGISTERS:
        return []
    return [
        f"{facts.registers} registers, limit {recorded['registers'] + MORE_REGISTERS - 1}: the ledger has {recorded['registers']}"
        " (--update takes the new figure)"
    ]
