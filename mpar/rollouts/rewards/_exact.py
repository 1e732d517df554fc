"""Rewards by rules on the text: the exact answer, a format, a length."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from mpar.errors import DataError
from mpar.rollouts._rollout import Rollout

__all__ = ["exact", "format_matches", "length", "overlong"]


def exact(rollouts: Sequence[Rollout], *, column: str = "answer", pattern: str | None = None) -> list[float]:
    """1 for an answer that is the same as the column of its row, else 0; white space around both does not count.

    Numbers are compared as numbers, so 7.0 is 7. pattern: a regular expression whose last match in the answer counts, or its
    first group if it has groups; an answer without a match is wrong. Raises DataError if a row has no such column.
    """
    lacking = [rollout.name for rollout in rollouts if column not in rollout.columns]
    if lacking:
        known = sorted(set().union(*(rollout.columns for rollout in rollouts)))
        raise DataError(
            f"the reward `exact` reads the column {column!r}, which {lacking[0]} does not have; its columns are "
            f"{', '.join(known) or 'none besides the prompt'}. task.reward_options={{exact: {{column: NAME}}}} names another"
        )
    compiled = None if pattern is None else re.compile(pattern)
    return [float(_same(_stated(rollout.answer, compiled), str(rollout.columns[column]))) for rollout in rollouts]


def format_matches(rollouts: Sequence[Rollout], *, pattern: str) -> list[float]:
    """1 for an answer that the regular expression matches from its beginning to its end, else 0. A dot also matches new lines."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(rollout.answer) is not None) for rollout in rollouts]


def length(rollouts: Sequence[Rollout], *, target: int) -> list[float]:
    """0 for an answer of at most `target` tokens, and less the longer it is: -1 at twice as many."""
    return [min(0.0, 1.0 - rollout.num_drawn / target) for rollout in rollouts]


def overlong(rollouts: Sequence[Rollout], *, max_tokens: int, cache: int) -> list[float]:
    """0 for answers of up to max_tokens - cache tokens, then less with every token, down to -1 at `max_tokens` (Yu et al. 2025,
    arXiv:2503.14476, eq. 13)."""
    return [max(-1.0, min(0.0, (max_tokens - cache - rollout.num_drawn) / cache)) for rollout in rollouts]


def _stated(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    """What the answer states: all of it, or what the pattern finds last."""
    if pattern is None:
        return answer
    found = list(pattern.finditer(answer))
    return found[-1][1 if pattern.groups else 0] if found else None


def _same(stated: str | None, wanted: str) -> bool:
    if stated is None:
        return False
    stated, wanted = stated.strip(), wanted.strip()
    return stated == wanted or _number(stated) == _number(wanted) is not None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
