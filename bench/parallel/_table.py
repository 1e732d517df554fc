"""The table of results as Markdown."""

from collections.abc import Sequence

from bench._result import Json, Result
from bench._statistics import interval_text

__all__ = ["table"]


def table(results: Sequence[Result]) -> str:
    """A row for each variant; a variant that is compared with several peers has a row for each of them."""
    rows = [
        "| ranks | config | variant | ms | CPU ms, all ranks | peer | this / peer, wall (95 %) | this / peer, CPU (95 %) "
        "| pairs, passes | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        foreign = "/".join(f"{x:.1f}" for x in result.numbers("foreign_cores"))
        start = (str(result.case["ranks"]), result.text("config"), result.text("variant"))
        times = (f"{result.number(key):.1f}" for key in ("median_ms", "cpu_ms"))
        first = (*start, *times)
        for theirs, ratios in (result.table("over") or {"": {}}).items():
            shown = (_interval(ratios, key) for key in ("wall", "cpu"))
            pairs = f"{result.figures['pairs']}, {result.figures['passes']}" if theirs else ""
            rows.append(f"| {' | '.join((*first, theirs, *shown, pairs, foreign))} |")
    return "\n".join(rows) + "\n"


def _interval(ratios: Json, key: str) -> str:
    return interval_text(ratios[key]) if isinstance(ratios, dict) and key in ratios else ""
