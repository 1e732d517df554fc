"""Measure: one row is checked against float64 and then timed. What goes wrong is reported, and does not stop the rest."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import _timing
from bench.kernels._row import Built, Measured, Row, Setting, Variant
from mpar.errors import UnknownNameError
from mpar.testing import TOLERANCES

__all__ = ["STICKY", "measure"]

SEED = 20260101
STICKY = ("CUDA error", "illegal memory access", "unspecified launch failure", "device-side assert")
"""Words of errors after which a process can no longer use its GPU."""


class WrongNumbers(Exception):
    """Results differ from the reference."""


def measure(
    row: Row,
    device: str,
    ceilings: Mapping[str, float] | None,
    share: float,
    partial: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """One line of results. Without `ceilings` the operands are tiny, and nothing is timed.

    `partial` is called with the unfinished line as soon as our kernel is timed, because peers may take long to compile.
    """
    started = time.perf_counter()
    line = row.about() | {"status": "ok", "variants": {}, "bars": {bar.text: "not measured" for bar in row.bars}}
    if row.build is None:
        return line | {"status": "not built", "error": row.missing}
    setting = Setting(torch.device(device), torch.Generator(device).manual_seed(SEED))
    sizes = row.shape.tiny if ceilings is None else row.shape.sizes
    try:
        _fill(line, row, row.build(setting, **sizes), ceilings, share, partial)
    except UnknownNameError as error:
        line |= {"status": "not built", "error": str(error)}
    except Exception as error:  # a row that fails is a line of the table, and the others go on
        line |= {"status": "failed", "error": _words(error)}
    return line | {"seconds": time.perf_counter() - started}


def _fill(
    line: dict[str, Any],
    row: Row,
    built: Built,
    ceilings: Mapping[str, float] | None,
    share: float,
    partial: Callable[[dict[str, Any]], None],
) -> None:
    expected = [x.detach().double() for x in built.reference()]
    with _poisoned():
        line["variants"]["ours"] = {"error": _check(built.ours, expected, built.tolerance, complete=True)}
    good: dict[str, Callable[[], Any]] = {"ours": built.ours.run}
    if ceilings is not None:
        _time(line, row, built, good, ceilings, share)
        partial(line)
    for name, peer in built.peers.items():
        cell = line["variants"][name] = _try(peer, expected, built.tolerance)
        if isinstance(peer, Variant) and "failed" not in cell:
            good[name] = peer.run
    del expected
    if ceilings is not None:
        _time(line, row, built, good, ceilings, share)


def _time(
    line: dict[str, Any],
    row: Row,
    built: Built,
    good: Mapping[str, Callable[[], Any]],
    ceilings: Mapping[str, float],
    share: float,
) -> None:
    """Add times, memory and what follows from them to `line`."""
    for name, times in _timing.time_in_turn(good, share=share).items():
        line["variants"][name] |= times.summary()
    for name, run in good.items():
        line["variants"][name]["peak_bytes"] = _timing.peak_bytes(run)
    if line["variants"]["ours"]["ms"] < _timing.SHORT_MS:
        for name, run in good.items():
            line["variants"][name] |= _in_graph(run)
    line |= _figures(row, built, line["variants"], ceilings)


def _figures(row: Row, built: Built, variants: Mapping[str, Any], ceilings: Mapping[str, float]) -> dict[str, Any]:
    columns = {
        key: {name: cell[key] for name, cell in variants.items() if key in cell} for key in ("ms", "graph_ms", "peak_bytes")
    }
    flops_per_s = ceilings["flops_per_s"] * built.rate
    measured = Measured(
        columns["ms"],
        columns["graph_ms"],
        columns["peak_bytes"],
        built.bytes,
        built.flops,
        ceilings["copy_bytes_per_s"],
        flops_per_s,
    )
    ours_s, best = 1e-3 * measured.ms["ours"], measured.best_peer()
    bound_by_flops = built.flops / flops_per_s > built.bytes / measured.copy_bytes_per_s
    rate = f"{1e-12 * built.flops / ours_s:.0f} TFLOP/s" if bound_by_flops else f"{1e-9 * built.bytes / ours_s:.0f} GB/s"
    return {
        "floor_ms": measured.floor_ms,
        "bytes": built.bytes,
        "flops": built.flops,
        "rate": rate,
        "of_ceiling": measured.floor_ms / measured.ms["ours"],
        "best_peer": best,
        "over_best_peer": None if best is None else measured.ms[best] / measured.ms["ours"],
        "bars": {bar.text: bar.verdict(measured) for bar in row.bars},
    }


def _check(variant: Variant, expected: Sequence[Tensor], tolerance: float | None, *, complete: bool = False) -> float:
    """The largest relative error of the results, of which peers may have fewer. Raises WrongNumbers if it is too large."""
    result = variant.run()
    actual = list(result) if variant.select is None else list(variant.select(result))
    worst = 0.0
    for index, (x, reference) in enumerate(zip(actual, expected, strict=complete)):
        if x.shape != reference.shape:
            raise WrongNumbers(f"result {index} has shape {tuple(x.shape)}, the reference {tuple(reference.shape)}")
        bound = tolerance or TOLERANCES.get(x.dtype, 0.0)
        error = _error(x.detach().double(), reference)
        if not error <= bound:
            raise WrongNumbers(f"result {index}: relative error {error:.2e}, limit {bound:.0e}")
        worst = max(worst, error)
    return worst


def _error(actual: Tensor, expected: Tensor) -> float:
    same = torch.isinf(expected) & (actual == expected)
    actual, expected = actual.masked_fill(same, 0.0), expected.masked_fill(same, 0.0)
    difference, size = torch.linalg.vector_norm(actual - expected).item(), torch.linalg.vector_norm(expected).item()
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _try(peer: Variant | str, expected: Sequence[Tensor], tolerance: float | None) -> dict[str, Any]:
    if isinstance(peer, str):
        return {"missing": peer}
    try:
        return {"error": _check(peer, expected, tolerance)}
    except Exception as error:  # of software that is not ours
        if any(words in str(error) for words in STICKY):
            raise
        return {"failed": _words(error)}


def _in_graph(run: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"graph_ms": _timing.graph_ms(run)}
    except Exception as error:  # a call that reads data on the host cannot be captured
        if any(words in str(error) for words in STICKY[1:]):
            raise
        return {"graph_failed": _words(error)}


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """While this lasts, new memory is filled with NaN or the largest integer, so that results that are not written show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of ops that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "OOM"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
