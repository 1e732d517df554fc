"""A rollout: one answer that the policy gave to a prompt, perhaps in several turns, and what it was worth."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data import Message

__all__ = ["Rollout"]


@dataclass(frozen=True)
class Rollout:
    """One answer to a prompt.

    prompt:      the text of the question. prompt_ids: the tokens that the policy read. name: the file and line of its row.
    group:       answers with the same number are compared with each other. choice: which answer of its group it is.
    answer:      the text that the policy wrote, in its last turn, without the token that ended it.
    answer_ids:  all tokens behind the prompt: those that the policy wrote, with those that ended its turns, and between them
                 those of the environment. given: where the latter begin and end among them.
    logps:       the log-probability of each of these tokens when it was drawn, 0 for one that was not; empty if none was.
    finish:      `stop` if a token ended the answer, `length` if there was no room for more.
    turns:       with an environment, the messages behind the prompt: those of the policy and those of the environment.
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
    given: tuple[tuple[int, int], ...] = ()
    turns: tuple[Message, ...] = ()

    @property
    def num_positions(self) -> int:
        """The positions that prompt and answer take in a row: the last token is only a label."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1

    @property
    def drawn(self) -> list[bool]:
        """For each token behind the prompt, whether the policy wrote it, and not the environment."""
        marks = [True] * len(self.answer_ids)
        for begin, end in self.given:
            marks[begin:end] = [False] * (end - begin)
        return marks

    @property
    def num_drawn(self) -> int:
        """How many tokens the policy wrote."""
        return len(self.answer_ids) - sum(end - begin for begin, end in self.given)

    @property
    def num_turns(self) -> int:
        """How often the policy wrote."""
        return sum(message["role"] == "assistant" for message in self.turns) or 1

    @property
    def text(self) -> str:
        """All that was written behind the prompt; of a conversation, each message of the environment follows its role."""
        if not self.turns:
            return self.answer
        parts = (str(one["content"]) if one["role"] == "assistant" else f"[{one['role']}] {one['content']}" for one in self.turns)
        return "\n".join(parts)
