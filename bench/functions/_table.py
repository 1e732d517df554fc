"""What a run found, as lines and as a table."""

from collections import Counter
from collections.abc import Sequence

from bench._result import Origin, Result
from bench.functions._run import Outcome

__all__ = ["result_of", "table", "totals"]


def result_of(outcome: Outcome, origin: Origin) -> Result:
    """A line of results."""
    case = {"bench": "functions", "name": outcome.function, "mesh": outcome.mesh, "variant": outcome.part}
    figures = {
        "verdict": outcome.verdict,
        "message": outcome.message.split("\n")[0][:200],
        "collectives": dict(outcome.collectives),
        "sent_bytes": outcome.sent,
        "needless_gathers": outcome.needless,
    }
    return Result(case, figures, origin)


def table(outcomes: Sequence[Outcome], *, messages: bool = False) -> str:
    """One row for each function, mesh and part."""
    lines = ["| function | mesh | part | verdict | needless gathers | bytes sent | collectives |", "|---|---|---|---|---|---|---|"]
    for each in outcomes:
        used = ", ".join(f"{count} {kind}" for kind, count in each.collectives)
        message = each.message if messages else each.message.split("\n")[0][:150]
        lines.append(
            f"| {each.function} | {each.mesh} | {each.part} | {each.verdict} | {each.needless or ''} | {each.sent:,} "
            f"| {used or message} |"
        )
    return "\n".join(lines) + "\n"


def totals(outcomes: Sequence[Outcome]) -> str:
    """How many functions are exact in every part on every mesh, and how many are not."""
    names = dict.fromkeys(outcome.function for outcome in outcomes)
    verdicts = {name: {outcome.verdict for outcome in outcomes if outcome.function == name} for name in names}
    worst = Counter(next(v for v in ("crash", "wrong", "refused", "exact") if v in found) for found in verdicts.values())
    gathering = {outcome.function for outcome in outcomes if outcome.needless}
    return (
        f"\n{len(names)} functions: {worst['exact']} exact, {worst['wrong']} wrong, {worst['refused']} refused, "
        f"{worst['crash']} crash\n"
        f"gathers that theory does not need: {sum(outcome.needless for outcome in outcomes)}, "
        f"in {sum(outcome.needless > 0 for outcome in outcomes)} of {len(outcomes)} programs, of {len(gathering)} functions\n"
        f"bytes that each rank sends: {sum(outcome.sent for outcome in outcomes):,}\n"
    )
