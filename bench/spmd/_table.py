"""The table of results as Markdown."""

from collections.abc import Sequence

from bench._result import Result
from bench._statistics import interval_text, verdict

__all__ = ["table"]


def table(results: Sequence[Result]) -> str:
    """One row for each config, mesh and variant, the newest last."""
    newest = {tuple(result.text(key) for key in ("config", "mesh", "variant")): result for result in results}
    rows = [
        "| config | mesh | peer | ms | CPU ms, all ranks | mpar / peer, wall (95 %) | mpar / peer, CPU (95 %) | bar "
        "| pairs, passes, launches | foreign cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for names, result in newest.items():
        keys = ("mpar_over_this_wall", "mpar_over_this_cpu")
        wall, cpu = (interval_text(result.numbers(key) if result.has(key) else None) for key in keys)
        bar = f"{result.figures['bar']} {_verdict(result)}" if result.has("bar") else ""
        counts = (result.figures.get(key, "") for key in ("pairs", "passes", "launches"))
        pairs = ", ".join(str(count) for count in counts) if result.has("pairs") else ""
        foreign = "/".join(f"{x:.1f}" for x in result.numbers("foreign_cores")) if result.has("foreign_cores") else ""
        times = (f"{result.number(key):.1f}" for key in ("median_ms", "cpu_ms"))
        rows.append(f"| {' | '.join((*names, *times, wall, cpu, bar, pairs, foreign))} |")
    return "\n".join(rows) + "\n"


def _verdict(result: Result) -> str:
    """The bar is met if the interval's lower end is under it. The table says where the interval reaches over the bar."""
    return verdict(result.numbers("mpar_over_this_wall"), result.number("bar")) if result.figures["under_bar"] else "**missed**"
