"""What a run found, as lines of results and as a table, with the bytes of GSPMD beside those of mpar."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeAlias

from bench._result import Origin, Result
from bench.functions._run import Outcome

__all__ = ["Traffic", "gspmd_line", "outcomes_of", "page", "ratio", "result_lines", "table", "totals", "traffic_of"]

OURS, THEIRS = "functions", "functions gspmd"

Traffic: TypeAlias = dict[tuple[str, str, str], float]
"""By function, mesh and part: the bytes that each rank sends."""


def result_lines(outcomes: Sequence[Outcome], origin: Origin) -> list[Result]:
    """A line for each function: by mesh and part what became of it."""
    lines: dict[str, dict[str, dict[str, dict]]] = {}
    for each in outcomes:
        facts = asdict(each) | {"message": each.message.split("\n")[0], "collectives": dict(each.collectives)}
        kept = {key: facts[key] for key in ("verdict", "needless", "sent", "collectives", "message") if facts[key]}
        lines.setdefault(each.function, {}).setdefault(each.mesh, {})[each.part] = kept
    return [Result({"bench": OURS, "name": name}, meshes, origin) for name, meshes in lines.items()]


def gspmd_line(name: str, meshes: Mapping[str, Mapping[str, Mapping[str, object]]], origin: Origin) -> Result:
    """A line for a function in JAX."""
    return Result({"bench": THEIRS, "name": name}, meshes, origin)


def traffic_of(results: Iterable[Result]) -> Traffic:
    """What GSPMD sends, by the lines of a file."""
    out = {}
    for line in results:
        if line.text("bench") == THEIRS:
            for mesh, parts in line.figures.items():
                out |= {(line.text("name"), mesh, part): facts["sent"] for part, facts in parts.items()}
    return out


def outcomes_of(results: Iterable[Result]) -> list[Outcome]:
    """What became of every function, by the lines of a file."""
    return [
        Outcome(
            *(line.text("name"), mesh, part, facts["verdict"], facts.get("message", "")),
            *(tuple(facts.get("collectives", {}).items()), facts.get("sent", 0), facts.get("needless", 0)),
        )
        for line in results
        if line.text("bench") == OURS
        for mesh, parts in line.figures.items()
        for part, facts in parts.items()
    ]


def page(results: Sequence[Result]) -> str:
    """The totals of a file, and every program that is not exact or gathers what theory leaves in its place."""
    outcomes, gspmd = outcomes_of(results), traffic_of(results)
    lacking = [each for each in outcomes if each.needless or each.verdict != "exact"]
    origin = next(line.origin for line in results if line.text("bench") == OURS)
    return (
        f"# Functions that researchers write\n\n`{origin.command}`, commit {origin.commit}, {origin.date}, {origin.cpu}, "
        f"torch {origin.torch}. Written by the run.\n{totals(outcomes, gspmd)}\n"
        "Programs that are not exact, or gather values that theory leaves where they are:\n\n" + table(lacking, gspmd)
    )


def table(outcomes: Sequence[Outcome], gspmd: Traffic, *, messages: bool = False) -> str:
    """One row for each function, mesh and part."""
    heads = ("function", "mesh", "part", "verdict", "needless gathers", "bytes sent", "of GSPMD", "collectives")
    rows = [heads, ("---",) * len(heads)]
    for each in outcomes:
        used = ", ".join(f"{count} {kind}" for kind, count in each.collectives)
        message = each.message if messages else each.message.split("\n")[0][:150]
        theirs = gspmd.get((each.function, each.mesh, each.part))
        beside = "" if theirs is None else f"{theirs:,.0f}"
        needless = str(each.needless or "")
        rows.append((each.function, each.mesh, each.part, each.verdict, needless, f"{each.sent:,}", beside, message or used))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def totals(outcomes: Sequence[Outcome], gspmd: Traffic) -> str:
    """How many functions are exact in every part on every mesh, how many are not, and what they send."""
    names = dict.fromkeys(outcome.function for outcome in outcomes)
    verdicts = {name: {outcome.verdict for outcome in outcomes if outcome.function == name} for name in names}
    worst = Counter(next(v for v in ("crash", "wrong", "refused", "exact") if v in found) for found in verdicts.values())
    gathering = [outcome for outcome in outcomes if outcome.needless]
    return (
        f"\n{len(names)} functions: {worst['exact']} exact, {worst['wrong']} wrong, {worst['refused']} refused, "
        f"{worst['crash']} crash\n"
        f"gathers that theory does not need: {sum(outcome.needless for outcome in gathering)}, in {len(gathering)} of "
        f"{len(outcomes)} programs, of {len({outcome.function for outcome in gathering})} functions\n" + ratio(outcomes, gspmd)
    )


def ratio(outcomes: Sequence[Outcome], gspmd: Traffic) -> str:
    """The bytes of both compilers, in total and by function, for the programs that both have."""
    ours: Counter[str] = Counter()
    theirs: Counter[str] = Counter()
    for each in outcomes:
        if each.verdict == "exact" and (key := (each.function, each.mesh, each.part)) in gspmd:
            ours[each.function] += each.sent
            theirs[each.function] += gspmd[key]
    if not theirs:
        return ""
    each_ratio = ", ".join(f"{name} {ours[name] / theirs[name]:.2f}" for name in theirs if theirs[name])
    return (
        f"bytes beside GSPMD, {len(theirs)} functions: {ours.total():,} / {theirs.total():,.0f} = "
        f"{ours.total() / theirs.total():.3f}\n{each_ratio}\n"
    )
