"""The plan of rollouts: how many answers are drawn at a time, how they lie in batches, and how often each is learned from."""

import math
from dataclasses import dataclass, field

from mpar.data import BatchShape
from mpar.errors import ConfigError
from mpar.rollouts._advantages import Baseline, Scale, TokenAdvantages
from mpar.rollouts._rollout import Rollout

__all__ = ["RolloutPlan"]


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """How answers are drawn, compared and laid out.

    shape:             rows and positions of a batch. As many answers share a row as always fit, however long they become.
    group_size:        answers to each prompt. scale, baseline: how they are compared, as `advantages` says.
    max_prompt_tokens: the most tokens of a prompt; max_tokens: of an answer.
    num_batches:       the batches that are drawn at a time, with the same parameters. num_rounds: how often each is learned from.
    max_redraws:       how often a group in which all rewards are equal is replaced by one for another prompt (DAPO).
    drop_truncated:    do not learn from answers that did not end by themselves.
    by_token:          advantages of tokens, from values that are measured when answers are drawn; None: of answers.
    rewarded:          whether answers have rewards, without which they are not learned from.
    policy_share:      the share of answers that the policy draws; the others are those of the data, or the `teacher`'s.
    max_turns:         how often the policy may write in a conversation with an environment; None: as long as `max_tokens`, which
                       counts all that is written behind the prompt, leaves room. max_turn_tokens: the most tokens of each time.
    Raises ConfigError with all sizes that do not fit each other.
    """

    shape: BatchShape
    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    num_batches: int = 1
    num_rounds: int = 1
    scale: Scale = "group"
    baseline: Baseline = "mean"
    max_redraws: int = 0
    drop_truncated: bool = False
    by_token: TokenAdvantages | None = field(default=None, repr=False)
    rewarded: bool = field(default=True, repr=False)
    policy_share: float = field(default=1.0, repr=False)
    teacher: bool = field(default=False, repr=False)
    max_turns: int | None = field(default=None, repr=False)
    max_turn_tokens: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        least = {"group_size": 1, "max_prompt_tokens": 2, "max_tokens": 1, "num_batches": 1, "num_rounds": 1, "max_redraws": 0}
        problems = [f"{name}={getattr(self, name)} is below {low}" for name, low in least.items() if getattr(self, name) < low]
        bounds = {"max_turns": self.max_turns, "max_turn_tokens": self.max_turn_tokens}
        problems += [f"{name}={bound} is below 1" for name, bound in bounds.items() if bound is not None and bound < 1]
        if self.group_size == 1 and self.rewarded and self.by_token is None:
            problems.append("group_size=1: the answers to a prompt are compared with each other, so there must be two")
        if self.answers_per_row < 1:
            problems.append(
                f"a row has seq_len={self.shape.seq_len} positions, and a prompt with its answer may take {self._positions}: "
                f"max_prompt_tokens={self.max_prompt_tokens} and max_tokens={self.max_tokens}, whose last one is only a label"
            )
        elif not problems and self.num_answers % self.group_size:
            problems.append(
                f"{self.num_answers} answers are drawn at a time (num_batches={self.num_batches} of batch_size="
                f"{self.shape.batch_size} rows with {self.answers_per_row} each), which are no full groups of "
                f"group_size={self.group_size}: take a batch of {self._full_batch} rows, or another group_size"
            )
        if problems:
            raise ConfigError("cannot draw answers:\n  " + "\n  ".join(problems))

    @property
    def _positions(self) -> int:
        return self.max_prompt_tokens + self.max_tokens - 1

    @property
    def answers_per_row(self) -> int:
        """How many answers share a row."""
        return self.shape.seq_len // max(1, self._positions)

    @property
    def num_answers(self) -> int:
        """How many answers are drawn at a time."""
        return self.num_batches * self.shape.batch_size * self.answers_per_row

    @property
    def _full_batch(self) -> int:
        """The fewest rows from the batch size on, in multiples of it, whose answers are full groups."""
        return self.shape.batch_size * self.group_size // math.gcd(self.num_answers, self.group_size)

    @property
    def num_groups(self) -> int:
        """How many prompts are answered at a time."""
        return self.num_answers // self.group_size

    @property
    def reads_answers(self) -> bool:
        """Whether some answers are those of the data, which each row must have then."""
        return self.policy_share < 1 and not self.teacher

    @property
    def steps(self) -> int:
        """For how many updates answers are drawn at a time."""
        return self.num_batches * self.num_rounds

    def learns_from(self, rollout: Rollout) -> bool:
        """Whether training learns from an answer."""
        given = rollout.reward is not None or not self.rewarded
        return given and not (self.drop_truncated and rollout.finish == "length")

    @property
    def fingerprint(self) -> str:
        """What batches depend on, in words: those of before there were advantages of tokens, where there are none."""
        more = [self.by_token, self.rewarded, self.policy_share, self.teacher]
        turns = [self.max_turns, self.max_turn_tokens]
        if turns != [None, None]:
            return repr((self, more, turns))
        return repr(self) if more == [None, True, 1.0, False] else repr((self, more))

    def answers_of(self, step: int, row: int) -> range:
        """The answers, of those drawn at a time, that are in a row of the batch of `step`."""
        begin = (step % self.num_batches * self.shape.batch_size + row) * self.answers_per_row
        return range(begin, begin + self.answers_per_row)
