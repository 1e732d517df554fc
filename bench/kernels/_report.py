"""Report: the table of kernels as Markdown, from lines of results; what no line is about is not yet measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench._gpu import describe_facts
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


def markdown(rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]) -> str:
    """The table; of several lines about a row the last counts."""
    newest = {line["row"]: line for line in lines}
    text = ["# Kernels on a GPU", "", "Made by `python -m bench.kernels run`; all runs are in `kernels.jsonl`.", ""]
    facts = dict.fromkeys(describe_facts(newest[row.key]) for row in rows if row.key in newest)
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
    problems = [f"- {line['row']}: {name}: {_problem(cell)}" for line in newest.values() for name, cell in _troubled(line)]
    problems += [f"- {line['row']}: all after ours: {line['cut']}" for line in newest.values() if "cut" in line]
    return "\n".join([*text, *(["", "Peers that did not run:", "", *problems] if problems else [])]) + "\n"


def sentence(line: Mapping[str, Any]) -> str:
    """One line for the screen."""
    if line["status"] != "ok":
        return f"{line['row']}: {line['status'].upper()}: {line.get('error', '')}"
    cells = line["variants"]
    parts = [f"{name} {cell['ms']:.4g} ms" for name, cell in cells.items() if "ms" in cell]
    parts += [f"{name} {_problem(cell)}" for name, cell in _troubled(line)]
    if "of_ceiling" in line:
        parts.append(f"{100 * line['of_ceiling']:.0f} % of ceiling, {line['rate']}")
        parts += [f"{text}: {verdict}" for text, verdict in line["bars"].items()]
        parts += [f"peers were cut off: {line['cut']}"] if "cut" in line else []
    else:
        parts.append(f"relative error {cells['ours']['error']:.1e}")
    return f"{line['row']}: {'; '.join(parts)}"


def _cells(row: Row, line: Mapping[str, Any] | None) -> list[str]:
    shape = " ".join(f"{key}{value}" for key, value in row.shape.sizes.items()) + f" {row.dtype}"
    first = [str(row.number), row.name, shape]
    if row.build is None:
        return [*first, "", row.missing, *[""] * 8, _bars(row, None)]
    if line is None:
        return [*first, "", "not yet measured", *[""] * 8, _bars(row, None)]
    if line["status"] != "ok":
        return [*first, "", f"{line['status']}: {line.get('error', '')}".replace("|", "/"), *[""] * 8, _bars(row, line)]
    cells, best = line["variants"], line["best_peer"]
    ours, peer = cells["ours"], cells.get(best, {})
    peaks = f"{ours['peak_bytes'] / 1e6:.0f}" + (f", {peer['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in peer else "")
    return [
        *first,
        f"{line['floor_ms']:.3g}",
        f"{_ms(ours)} ({ours['q20']:.4g} to {ours['q80']:.4g})",
        _ms(cells.get("eager", {})),
        _ms(cells.get("torch.compile", {})),
        "" if best is None else f"{_ms(peer)} ({best})",
        line["rate"],
        f"{100 * line['of_ceiling']:.0f} %",
        "" if best is None else f"{line['over_best_peer']:.2f}",
        peaks,
        f"{ours['error']:.1e}",
        _bars(row, line),
    ]


def _ms(cell: Mapping[str, Any]) -> str:
    if "ms" not in cell:
        return _problem(cell) if cell else ""
    return f"{cell['ms']:.4g}" + (f" ({cell['graph_ms']:.3g} graph)" if "graph_ms" in cell else "")


def _bars(row: Row, line: Mapping[str, Any] | None) -> str:
    verdicts = line.get("bars", {}) if line else {}
    return "; ".join(f"{bar.text}: {_bold(verdicts.get(bar.text, 'not measured'))}" for bar in row.bars)


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict.startswith("missed") else verdict


def _troubled(line: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, cell) for name, cell in line["variants"].items() if "failed" in cell or "missing" in cell]


def _problem(cell: Mapping[str, Any]) -> str:
    return cell["missing"] if "missing" in cell else f"failed: {cell.get('failed', '')}".replace("|", "/")
