"""Compile: every case for every chip, in several processes; then a table of the results, and what is over its limit."""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tools.kernel_gate import _ledger, _worker
from tools.kernel_gate._checks import ledger_failures
from tools.kernel_gate._facts import Facts

__all__ = ["compile_all", "table"]

Finished = Callable[[dict[str, Any]], None]
Unit = dict[str, Any]
"""A compilation, named by its "case", "arch" and "key", with its "hash"."""


def compile_all(
    archs: Sequence[str], *, only: str, changed: bool, update: bool, out: Path | None, jobs: int, ledger: Path
) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Compile and check. Returns the version of Triton, the results, and every failure in one line.

    changed: leave out kernels whose hash is that of the ledger. update: write results that pass to the ledger.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # with it, kernels would be imported as Python functions, in workers too
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        plans = list(pool.map(_worker.plan, archs, [only] * len(archs)))
        version = plans[0]["version"]
        recorded = _ledger.read(ledger, version)
        units = [unit for plan in plans for unit in plan["units"]]
        todo = [unit for unit in units if not (changed and _same(recorded, unit))]
        finished = functools.partial(_keep, ledger, version) if update else lambda result: None
        results = _compile_side_by_side(pool, todo, out, finished)
    messages = [line for plan in plans for line in plan["broken"]]
    for arch, plan in zip(archs, plans, strict=True):
        messages += [
            f"table.yaml has {kernel} for {arch} ({sizes}), which no case launches" for kernel, sizes in plan["unused"].items()
        ]
    for result in results:
        if result["facts"] is not None and not update:
            result["failures"] += ledger_failures(Facts(**result["facts"]), _entry(recorded, result))
    messages += [f"{result['key']} on {result['arch']}: {line}" for result in results for line in result["failures"]]
    messages += _without_dots(results, plans)
    if update:
        passed = [result for result in results if not result["failures"]]
        done = {(result["arch"], result["key"]) for result in results}
        others = {(arch, key) for arch in recorded for key in recorded[arch] if only or arch not in archs}
        keep = others | {(unit["arch"], unit["key"]) for unit in units}
        _ledger.write(ledger, version, passed, sorted(keep - done))
    elif changed:
        messages += [
            f"{unit['key']} on {unit['arch']}: not in {ledger.name} for Triton {version} as it is now; run `compile --update`"
            for unit in todo
        ]
    return version, results, messages


def table(results: Sequence[dict[str, Any]], recorded: dict[str, Any]) -> str:
    """One line for each kernel and chip."""
    rows = [("kernel", "chip", "registers", "spilled", "shared", "matrix", "TMA", "scalars", "narrow", "s", "")]
    for result in sorted(results, key=lambda result: (result["key"], result["arch"])):
        facts = result["facts"]
        if facts is None:
            rows.append((result["key"], result["arch"], *[""] * 8, "FAILED"))
            continue
        before = _entry(recorded, result)
        change = "" if before is None or before["registers"] == facts["registers"] else f" (was {before['registers']})"
        rows.append(
            (
                result["key"],
                result["arch"],
                f"{facts['registers']}{change}",
                str(facts["spill_bytes"]),
                str(facts["shared_bytes"]),
                " ".join(f"{count} {name}" for name, count in facts["matrix"].items()),
                str(facts["tma_loads"] or ""),
                str(facts["scalars"]),
                str(sum(facts["narrow"].values())),
                f"{result['seconds']:.1f}",
                "FAILED" if result["failures"] else "ok",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def _compile_side_by_side(pool: Any, todo: Sequence[Unit], out: Path | None, finished: Finished) -> list[dict[str, Any]]:
    """The results of all units. If a compiler kills its process, which ends the pool, what remains is compiled one by one."""
    folder = str(out) if out else ""
    groups: dict[tuple[str, str], list[Unit]] = {}
    for unit in todo:
        groups.setdefault((unit["arch"], unit["hash"]), []).append(unit)
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def add(group: tuple[str, str], found: list[dict[str, Any]]) -> None:
        results[group] = found
        seconds = found[0]["seconds"]
        sys.stderr.write(f"[{len(results)}/{len(groups)}] {found[0]['key']} {found[0]['arch']} {seconds:.1f} s\n")
        sys.stderr.flush()
        for result in found:
            finished(result)

    futures = {pool.submit(_worker.compile_units, units, folder): group for group, units in groups.items()}
    for future in concurrent.futures.as_completed(futures):
        with contextlib.suppress(BrokenProcessPool):
            add(futures[future], future.result())
    for group in groups.keys() - results.keys():
        add(group, _alone(groups[group], folder))
    return [result for found in results.values() for result in found]


def _alone(units: Sequence[Unit], folder: str) -> list[dict[str, Any]]:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_worker.compile_units, units, folder).result()
        except BrokenProcessPool:
            words = "does not compile: the compiler killed its process"
            return [dict(unit) | {"facts": None, "failures": [words], "seconds": 0.0} for unit in units]


def _without_dots(results: Sequence[dict[str, Any]], plans: Sequence[dict[str, Any]]) -> list[str]:
    """Cases that say `matrix` although none of their kernels has a product of matrices; all of them must have been compiled."""
    said = {name for plan in plans for name in plan["matrix"]}
    by_case: dict[tuple[str, str], list[int]] = {}
    for result in results:
        by_case.setdefault((result["case"], result["arch"]), []).append((result["facts"] or {"dots": 1})["dots"])
    units = [(unit["case"], unit["arch"]) for plan in plans for unit in plan["units"]]
    return [
        f"{case} on {arch}: says matrix, and launches no kernel with tl.dot"
        for (case, arch), dots in by_case.items()
        if case in said and not any(dots) and len(dots) == units.count((case, arch))
    ]


def _keep(ledger: Path, version: str, result: dict[str, Any]) -> None:
    """Write a result that passes to the ledger at once, so that a run that was broken off can go on with `--changed --update`."""
    if not result["failures"]:
        recorded = _ledger.read(ledger, version)
        _ledger.write(ledger, version, [result], [(arch, key) for arch in recorded for key in recorded[arch]])


def _same(recorded: dict[str, Any], unit: dict[str, Any]) -> bool:
    before = _entry(recorded, unit)
    return before is not None and before["hash"] == unit["hash"]


def _entry(recorded: dict[str, Any], unit: dict[str, Any]) -> dict[str, Any] | None:
    return recorded.get(unit["arch"], {}).get(unit["key"])
