"""Rewards by the shape of an answer: its length if it is right or wrong, and its repetitions (Yeo et al. 2025, 2502.03373)."""

import math
from collections.abc import Sequence

from mpar.errors import ConfigError
from mpar.rollouts._rollout import Rollout
from mpar.rollouts.rewards._exact import exact

__all__ = ["cosine", "repetition"]


def cosine(
    rollouts: Sequence[Rollout],
    *,
    max_tokens: int,
    correct: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-0.5, 0.0),
    column: str = "answer",
    pattern: str | None = None,
) -> list[float]:
    """What `exact` says, by length: a number between the two of `correct` or of `wrong`, which are those of an answer of no token
    and of one of `max_tokens` tokens or more. Half a wave of a cosine leads from one to the other. With the usual numbers short
    answers are worth more if they are correct, and long ones if they are wrong.

    column, pattern: as those of `exact`. Raises ConfigError unless both ranges have two numbers and `max_tokens` is positive.
    """
    if len(correct) != 2 or len(wrong) != 2 or max_tokens < 1:
        raise ConfigError(
            f"the reward `cosine` needs max_tokens of at least 1, and two numbers each for correct and wrong, not {max_tokens}, "
            f"{list(correct)} and {list(wrong)}. task.reward_options={{cosine: {{max_tokens: N, correct: [1.0, 0.5]}}}} sets them"
        )
    values = []
    for rollout, right in zip(rollouts, exact(rollouts, column=column, pattern=pattern), strict=True):
        shortest, longest = correct if right else wrong
        share = min(1.0, rollout.num_drawn / max_tokens)
        values.append(longest + (shortest - longest) * (1.0 + math.cos(math.pi * share)) / 2)
    return values


def repetition(rollouts: Sequence[Rollout], *, words: int = 3, penalty: float = 1.0) -> list[float]:
    """0 for an answer in which no sequence of so many words comes twice, less the larger the share of sequences that came before,
    down to -penalty. Words are what white space separates, in any case of letters."""
    if words < 1:
        raise ConfigError(f"the reward `repetition` compares sequences of at least 1 word, not of {words}")
    return [-penalty * _repeated(rollout.answer.lower().split(), words) for rollout in rollouts]


def _repeated(words: Sequence[str], length: int) -> float:
    """The share of the sequences of `length` words that came before."""
    sequences = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return 1.0 - len(set(sequences)) / len(sequences) if sequences else 0.0
