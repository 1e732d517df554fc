"""Sampling: how the next token is chosen, and what ends an answer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpar.errors import ConfigError

__all__ = ["MAX_ALTERNATIVES", "Sampling", "sampling_problems"]

MAX_ALTERNATIVES = 20
"""The most alternatives to a token whose log-probabilities can be asked for, as in OpenAI's interface."""


_LARGEST_TEMPERATURE = 1e30
"""With it all tokens are equally likely; float32 holds it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are chosen, and what ends it.

    Logits are changed in this order, which is that of transformers: `bias`, `repetition_penalty`, the other two penalties,
    `min_tokens` and `schema` (what may not come next is out), `temperature`, `top_k`, `top_p`, `min_p`.

    max_tokens:         the most tokens of the answer; None: as many as there is room for.
    min_tokens:         nothing ends the answer before it has so many tokens, but that it is complete by `schema`.
    temperature:        logits are divided by it; 0: the most likely token is taken, whatever `top_k`, `top_p` and `min_p` are.
    top_k:              only tokens whose logit is at least the k-th largest; 0: all.
    top_p:              only the fewest most likely tokens with this probability in total; 1: all.
    min_p:              only tokens with at least this share of the probability of the most likely one; 0: all.
    repetition_penalty: logits of tokens in prompt or answer are divided by it, or multiplied where they are negative.
    presence_penalty:   is subtracted from the logits of tokens in the answer; frequency_penalty: as often as they occur there.
    bias:               is added to logits, by token.
    stop:               texts that end the answer, which does not contain them.
    stop_ids:           tokens that end the answer, besides those that always do.
    ignore_eos:         whether the answer goes on after a token that would always end it.
    schema:             a JSON Schema, as JSON: the answer is JSON as it says, unless it ends before for lack of tokens or by a
                        stop text; None: any text.
    seed:               draws depend on it, on the number of the token in its row and on the token alone.
    num_alternatives:   for how many of the likeliest tokens log-probabilities are given, besides that of the chosen one; None: no
                        log-probabilities. They are those of the logits before any change.
    Raises ConfigError with all values that are impossible.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    schema: str | None = None
    seed: int = 0
    num_alternatives: int | None = None

    def __post_init__(self) -> None:
        problems = sampling_problems(vars(self))
        if problems:
            lines = [f"{name}={getattr(self, name)!r}: it {problem}" for name, problem in problems.items()]
            raise ConfigError("cannot sample with\n  " + "\n  ".join(lines))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def counts_answer(self) -> bool:
        """Whether the tokens of the answer so far change the logits by how often they occur."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


_BOUNDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda count: count is None or count >= 1, "must be at least 1"),
    "min_tokens": (lambda count: count >= 0, "must not be negative"),
    "temperature": (lambda t: 0 <= t <= _LARGEST_TEMPERATURE, f"must be between 0 and {_LARGEST_TEMPERATURE:g}"),
    "top_k": (lambda k: k >= 0, "must not be negative; 0 means all tokens"),
    "top_p": (lambda p: 0 < p <= 1, "must be above 0 and at most 1"),
    "min_p": (lambda p: 0 <= p <= 1, "must be between 0 and 1"),
    "repetition_penalty": (lambda factor: 1e-6 <= factor <= 1e6, "must be between 1e-6 and 1e6; 1 changes nothing"),
    "presence_penalty": (lambda penalty: -2 <= penalty <= 2, "must be between -2 and 2"),
    "frequency_penalty": (lambda penalty: -2 <= penalty <= 2, "must be between -2 and 2"),
    "bias": (lambda bias: all(math.isfinite(b) and i >= 0 for i, b in bias.items()), "must give finite numbers by token"),
    "stop_ids": (lambda ids: all(token >= 0 for token in ids), "has negative tokens"),
    "stop": (all, "has an empty text, which would end every answer"),
    "seed": (lambda seed: 0 <= seed < 2**63, "must be between 0 and 2**63 - 1"),
    "num_alternatives": (lambda n: n is None or 0 <= n <= MAX_ALTERNATIVES, f"must be between 0 and {MAX_ALTERNATIVES}"),
}


def sampling_problems(values: Mapping[str, object]) -> dict[str, str]:
    """What values of a `Sampling` must do or must not have, by name, for those of `values` that are impossible."""
    return {name: problem for name, (holds, problem) in _BOUNDS.items() if name in values and not holds(values[name])}
