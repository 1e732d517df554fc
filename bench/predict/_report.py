"""Report: predicted beside published times as a table, and how large the errors are."""

from collections.abc import Iterable, Sequence
from statistics import correlation, median

from bench.predict._own import Timed
from bench.predict._predicted import Judged

__all__ = ["own_summary", "summary", "table"]

HEAD = "| row | family | role | GPUs | published s | predicted s | error | exposed | bubble |"


def table(judged: Sequence[Judged]) -> str:
    """A Markdown table, one line for each row."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for one in judged:
        shares = " | ".join(f"{100 * share:.1f} %" for share in (one.error, one.exposed, one.bubble))
        row = one.row
        figures = f"{row.num_ranks} | {one.published_s:.3f} | {one.predicted_s:.3f} | {shares}"
        lines.append(f"| {row.number} | {row.family} | {row.role} | {figures} |")
    return "\n".join([*lines, ""])


def summary(judged: Sequence[Judged]) -> str:
    """The errors of families, each the median of its rows, so that a family counts once however many rows it has.

    Families of slower stacks have a factor from one of their rows, and are counted apart, without that row.
    """
    plain = [one for one in judged if one.row.role in ("fit", "judge")]
    sets = {
        "all families": _by_family(plain),
        "families with rows that nothing was fitted to": _by_family(one for one in plain if one.row.role == "judge"),
        "families of slower stacks, after one factor each": _by_family(_after_factor(judged)),
    }
    lines = []
    for name, errors in sets.items():
        if errors:
            at_90 = sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]
            lines.append(f"{name}: {len(errors)}, median {100 * median(errors):.1f} %, 90th percentile {100 * at_90:.1f} %")
    return "\n".join([*lines, ""])


def own_summary(timed: Sequence[Timed]) -> str:
    """The errors of all cases, and for each model whether the order of its cases by time is as predicted (Spearman)."""
    errors = [abs(one.error) for one in timed]
    lines = [f"{len(timed)} cases: median {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"]
    for model in dict.fromkeys(one.case.model for one in timed):
        of_model = [one for one in timed if one.case.model == model]
        if len(of_model) > 2:
            found = _spearman([one.predicted_s for one in of_model], [one.measured_s for one in of_model])
            lines.append(f"{model}: rank correlation of {len(of_model)} cases {found:.2f}")
    return "\n".join([*lines, ""])


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks; `statistics.correlation` knows it from Python 3.12 on."""
    return correlation(*([sorted(values).index(value) for value in values] for values in (a, b)))


def _by_family(judged: Iterable[Judged | tuple[str, float]]) -> list[float]:
    """For each family the median of the sizes of its errors."""
    errors: dict[str, list[float]] = {}
    for one in judged:
        family, error = one if isinstance(one, tuple) else (one.row.family, one.error)
        errors.setdefault(family, []).append(abs(error))
    return [median(each) for each in errors.values()]


def _after_factor(judged: Sequence[Judged]) -> list[tuple[str, float]]:
    factors = {one.row.family: one.published_s / one.predicted_s for one in judged if one.row.role == "factor"}
    return [
        (one.row.family, one.predicted_s * factors[one.row.family] / one.published_s - 1)
        for one in judged
        if one.row.role == "slower" and one.row.family in factors
    ]
