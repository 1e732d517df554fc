"""Report: the table of kernels as Markdown, from lines of results. Rows without a line are shown as not yet measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench._gpu import describe
from bench._result import Result
from bench.kernels._row import Row

__all__ = ["markdown", "sentence"]

COLUMNS = (
    "#",
    "kernel",
    "shape",
    "floor ms",
    "ours ms (20 to 80 %)",
    "eager ms",
    "torch.compile ms",
    "best peer ms",
    "ours reaches",
    "of ceiling",
    "best peer / ours",
    "peak MB ours, best peer",
    "relative error",
    "bars",
)


def markdown(rows: Sequence[Row], results: Sequence[Result]) -> str:
    """The table. Of several lines about one row, the last counts."""
    newest = {result.text("row"): result for result in results}
    text = ["# Kernels on a GPU", "", "Made by `python -m bench.kernels run`; all runs are in `kernels.jsonl`.", ""]
    facts = dict.fromkeys(describe(newest[row.key].origin) for row in rows if row.key in newest)
    text += [f"- {fact}" for fact in facts] if facts else ["Nothing here has been measured on a GPU yet."]
    text += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in sorted(rows, key=lambda row: row.number):
        text.append(f"| {' | '.join(_cells(row, newest.get(row.key)))} |")
    text += [
        "",
        "Floor: the fewest bytes or operations at this machine's measured ceilings. Times are medians of rounds taken in",
    ]
    text += [
        "turn, with caches flushed before each call; (graph) is a replay from a CUDA graph, for what is shorter than 0.1 ms."
    ]
    text += ["Peers that are slower than ours have a ratio above 1. A bar is met, missed (with our figure) or not measured."]
    problems = [f"- {row}: {name}: {_problem(cell)}" for row, result in newest.items() for name, cell in _troubled(result)]
    problems += [f"- {row}: all after ours: {result.text('cut')}" for row, result in newest.items() if result.has("cut")]
    return "\n".join([*text, *(["", "Peers that did not run:", "", *problems] if problems else [])]) + "\n"


def sentence(result: Result) -> str:
    """One line for the screen."""
    if result.text("status") != "ok":
        return f"{result.text('row')}: {result.text('status').upper()}: {result.figures.get('error', '')}"
    variants = _variants(result)
    parts = [f"{name} {cell['ms']:.4g} ms" for name, cell in variants.items() if "ms" in cell]
    parts += [f"{name} {_problem(cell)}" for name, cell in _troubled(result)]
    if result.has("of_ceiling"):
        parts.append(f"{100 * result.number('of_ceiling'):.0f} % of ceiling, {result.text('rate')}")
        parts += [f"{text}: {verdict}" for text, verdict in result.table("bars").items()]
        parts += [f"peers were cut off: {result.text('cut')}"] if result.has("cut") else []
    else:
        parts.append(f"relative error {variants['ours']['error']:.1e}")
    return f"{result.text('row')}: {'; '.join(parts)}"


def _cells(row: Row, result: Result | None) -> list[str]:
    shape = " ".join(f"{key}{value}" for key, value in row.shape.sizes.items()) + f" {row.dtype}"
    first = [str(row.number), row.name, shape]
    if row.build is None:
        return [*first, "", row.missing, *[""] * 8, _bars(row, None)]
    if result is None:
        return [*first, "", "not yet measured", *[""] * 8, _bars(row, None)]
    if result.text("status") != "ok":
        words = f"{result.text('status')}: {result.figures.get('error', '')}".replace("|", "/")
        return [*first, "", words, *[""] * 8, _bars(row, result)]
    cells, best = _variants(result), result.figures["best_peer"]
    ours, peer = cells["ours"], cells.get(str(best), {})
    peaks = f"{ours['peak_bytes'] / 1e6:.0f}" + (f", {peer['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in peer else "")
    return [
        *first,
        f"{result.number('floor_ms'):.3g}",
        f"{_ms(ours)} ({ours['q20']:.4g} to {ours['q80']:.4g})",
        _ms(cells.get("eager", {})),
        _ms(cells.get("torch.compile", {})),
        "" if best is None else f"{_ms(peer)} ({best})",
        result.text("rate"),
        f"{100 * result.number('of_ceiling'):.0f} %",
        "" if best is None else f"{result.number('over_best_peer'):.2f}",
        peaks,
        f"{ours['error']:.1e}",
        _bars(row, result),
    ]


def _ms(cell: Mapping[str, Any]) -> str:
    if "ms" not in cell:
        return _problem(cell) if cell else ""
    return f"{cell['ms']:.4g}" + (f" ({cell['graph_ms']:.3g} graph)" if "graph_ms" in cell else "")


def _bars(row: Row, result: Result | None) -> str:
    verdicts = result.table("bars") if result and result.has("bars") else {}
    return "; ".join(f"{bar.text}: {_bold(str(verdicts.get(bar.text, 'not measured')))}" for bar in row.bars)


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict.startswith("missed") else verdict


def _variants(result: Result) -> dict[str, Mapping[str, Any]]:
    """What a result says of our kernel and of each peer: figures, or why there are none."""
    return {name: cell for name, cell in result.table("variants").items() if isinstance(cell, Mapping)}


def _troubled(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, cell) for name, cell in _variants(result).items() if "failed" in cell or "missing" in cell]


def _problem(cell: Mapping[str, Any]) -> str:
    return cell["missing"] if "missing" in cell else f"failed: {cell.get('failed', '')}".replace("|", "/")
