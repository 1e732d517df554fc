"""A rollout: one answer that the policy gave to a prompt, and what it was worth."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Rollout"]


@dataclass(frozen=True)
class Rollout:
    """One answer to a prompt.

    prompt:      the text of the question. prompt_ids: the tokens that the policy read. name: the file and line of its row.
    group:       answers with the same number are compared with each other. choice: which answer of its group it is.
    answer:      the text that the policy wrote, without the token that ended it. answer_ids: its tokens, with that token.
    logps:       the log-probability of each of these tokens when it was drawn; empty if it was not.
    finish:      `stop` if a token ended the answer, `length` if there was no room for more.
    columns:     the other columns of the row in the data, such as the solution.
    rewards:     what each reward function gave, by name; None where it gave none.
    reward:      their weighted sum; None if none of them gave one.
    advantage:   by how much the answer is better than its group.
    writer:      who wrote the answer: `policy`, `teacher`, or `data`.
    of_tokens:   by name, a number for each token of the answer, such as its value.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    name: str
    group: int
    choice: int
    answer: str
    answer_ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish: str
    columns: Mapping[str, object] = field(default_factory=dict)
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    writer: str = "policy"
    of_tokens: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def num_positions(self) -> int:
        """The positions that prompt and answer take in a row: the last token is only a label."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1
