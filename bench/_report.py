"""Lines of JSON, and the same as a Markdown table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "append_lines", "table"]

RESULTS = Path(__file__).resolve().parent / "results"


def append_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: one row for each (config, mesh, variant), newest last."""
    newest = {(line["config"], line["mesh"], line["variant"]): line for line in lines}
    rows = [
        "| config | mesh | peer | ms | CPU ms, all ranks | mpar / peer, wall (95 %) | mpar / peer, CPU (95 %) | bar "
        "| pairs, passes, launches | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (config, mesh, variant), line in newest.items():
        wall, cpu = (_ratio(line.get(f"mpar_over_this_{key}")) for key in ("wall", "cpu"))
        bar = "" if "bar" not in line else f"{line['bar']} {_verdict(line)}"
        pairs = f"{line['pairs']}, {line['passes']}, {line.get('launches', '')}" if "pairs" in line else ""
        foreign = "/".join(f"{x:.1f}" for x in line.get("foreign_cores", []))
        cells = (config, mesh, variant, f"{line['median_ms']:.1f}", f"{line['cpu_ms']:.1f}", wall, cpu, bar, pairs, foreign)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _verdict(line: dict[str, Any]) -> str:
    """The bar asks only for the interval's lower end; one that reaches over the bar decides little, and the table says so."""
    if not line["under_bar"]:
        return "**missed**"
    return "met" if line["mpar_over_this_wall"][2] <= line["bar"] else "straddled"


def _ratio(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"
