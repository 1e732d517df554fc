"""Run: the rows of the table, in order of importance while there is time, in another process, which may fail."""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._gpu import this_gpu_run
from bench._result import Json, Origin, Result, append_results, read_results
from bench.kernels._report import markdown, sentence
from bench.kernels._row import Row
from bench.kernels._server import Server
from bench.kernels.rows import all_rows, long_rows

__all__ = ["run", "write_table"]

ROW_S = 150.0
"""Seconds that a row may take, compilation included."""
NOT_INTERPRETED = ("InterpreterError", "0 active drivers")
"""Words in errors of kernels of others that the interpreter cannot run: they compute in narrow floats, or tune themselves."""
SPARE_S = 10.0
"""Seconds that are kept for ending."""


def run(numbers: Sequence[int], *, long: bool = False, tiny: bool, seconds: float, out: Path, commit: str, share: float) -> int:
    """Measure rows of the table, or of its long form; with `tiny` only check them, on the CPU.

    Returns how many rows went wrong or were not reached.
    """
    started = time.perf_counter()
    rows = [row for row in (long_rows() if long else all_rows()) if not numbers or row.number in numbers]
    if tiny:
        rows = list(
            {(row.name, row.dtype, *row.shape.tiny.items()): row for row in rows}.values()
        )  # one of each set of rows that have the same tiny sizes
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, in the process that measures
    server = Server("cpu" if tiny else "cuda")
    wrong = 0
    try:
        ceilings = None if tiny else server.ceilings(ROW_S)
        origin = Origin() if ceilings is None else _origin(commit, ceilings)
        for row in rows:
            left = seconds - SPARE_S - (time.perf_counter() - started)
            line = _not_reached(row) if left <= 0 else server.measure(row, ceilings, share, min(left, ROW_S))
            result = Result.of(line, origin)
            wrong += result.text("status") not in ("ok", "not built") or _peers_disagree(line, tiny)
            sys.stdout.write(f"[{time.perf_counter() - started:.0f} s] {sentence(result)}\n")
            sys.stdout.flush()
            if not tiny and result.text("status") != "not reached":
                append_results(out / "kernels.jsonl", [result])
                write_table(out)
    finally:
        server.close()
    return wrong


def write_table(out: Path) -> None:
    """`kernels.md` from `kernels.jsonl` in the folder `out`."""
    results = read_results(out / "kernels.jsonl")
    out.mkdir(parents=True, exist_ok=True)
    measured = {result.text("row") for result in results}
    rows = [*all_rows(), *(row for row in long_rows() if row.key in measured)]
    (out / "kernels.md").write_text(markdown(rows, results), encoding="utf-8")


def _not_reached(row: Row) -> dict[str, Json]:
    return row.about() | {"status": "not reached", "error": "time was over", "variants": {}, "bars": {}}


def _peers_disagree(line: Mapping[str, Any], tiny: bool) -> bool:
    """Whether a peer failed on the CPU for another reason than that the interpreter cannot run its kernels."""
    failed = [cell["failed"] for cell in line["variants"].values() if "failed" in cell]
    return tiny and any(not any(words in text for words in NOT_INTERPRETED) for text in failed)


def _origin(commit: str, ceilings: Mapping[str, float]) -> Origin:
    return dataclasses.replace(
        this_gpu_run(commit),
        liger="installed" if importlib.util.find_spec("liger_kernel") else "not installed",
        copy=f"{1e-9 * ceilings['copy_bytes_per_s']:.0f} GB/s",
        product=f"{1e-12 * ceilings['flops_per_s']:.0f} TFLOP/s",
    )
