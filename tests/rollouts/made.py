"""Prompts, rollouts and a sampler without a model, for tests."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mpar.data import BatchShape, DocumentBatches, Documents
from mpar.rollouts import Ask, Drawing, Drawn, Prompts, Reward, Rollout, RolloutBatches, RolloutPlan

__all__ = ["END", "HashSampler", "batches", "drawing", "plan", "prompts", "rollout"]

END = 9


def rollout(answer: str, columns: Mapping[str, object] | None = None, **changes: object) -> Rollout:
    """One answer, of as many tokens as it has characters."""
    ids = tuple(range(len(answer)))
    made = Rollout("2+2", (1, 2), "data.jsonl:1", 0, 0, answer, ids, (-0.5,) * len(ids), "stop", columns or {})
    return Rollout(**{**vars(made), **changes})


def prompts(count: int = 5) -> DocumentBatches:
    """Prompts of 2 to 4 tokens, each with the column `answer`."""
    sizes = [2 + i % 3 for i in range(count)]
    documents = Documents.from_ids([([i, *range(1, size)], [False] * size) for i, size in enumerate(sizes)])
    columns = {i: {"prompt": f"question {i}", "answer": str(i % 3)} for i in range(count)}
    documents = Documents(**{**vars(documents), "columns": columns})
    return DocumentBatches(documents, BatchShape(1, 8), vocab_size=10, pad_id=0, seed=3)


class HashSampler:
    """Answers whose tokens are a hash of what was asked and of the parameters; they have 1 to 4 tokens."""

    def __init__(self) -> None:
        self.params, self.loads, self.asked = 0.0, 0, 0

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Sampler`."""
        self.params, self.loads = float(sum(leaf.sum() for leaf in params.values())), self.loads + 1

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """See `Sampler`."""
        self.asked += len(asks)
        return [self._short(ask, self._answer(ask)) for ask in asks]

    def _short(self, ask: Ask, answer: Drawn) -> Drawn:
        most = ask.max_tokens or len(answer.tokens)
        return answer if len(answer.tokens) <= most else Drawn(answer.tokens[:most], answer.logps[:most], "length")

    def _answer(self, ask: Ask) -> Drawn:
        digest = hashlib.blake2b(repr((ask, self.params)).encode()).digest()
        tokens = tuple(byte % 9 for byte in digest[1 : 1 + digest[0] % 4])
        logps = tuple(float(np.float32(-byte / 64)) for byte in digest[10 : 11 + len(tokens)])
        if len(tokens) == 3 and digest[9] % 2:
            return Drawn((*tokens, 1), logps, "length")
        return Drawn((*tokens, END), logps, "stop")


def plan(**changes: object) -> RolloutPlan:
    """Four groups of three answers: two batches of two rows, three answers in each, learned from twice."""
    sizes = {"group_size": 3, "max_prompt_tokens": 4, "max_tokens": 4, "num_batches": 2, "num_rounds": 2}
    return RolloutPlan(**{"shape": BatchShape(2, 23), **sizes, **changes})


def drawing(of: RolloutPlan, sampler: HashSampler, rewards: Sequence[Reward], **changes: object) -> Drawing:
    """What rollouts are drawn with, on one rank."""
    documents = prompts()
    made = Drawing(
        of, Prompts(documents.documents, seed=3, shuffle=True), sampler, rewards, lambda ids: "".join(map(str, ids)), 3,
        lambda mine: [mine],
    )  # fmt: skip
    return Drawing(**{**vars(made), **changes})


def batches(of: RolloutPlan) -> RolloutBatches:
    """Batches that draw nothing before they are told with what."""
    return RolloutBatches(prompts(), of, rewards="sum")


def params(value: float) -> dict[str, Tensor]:
    """Parameters."""
    return {"w": torch.full((2,), value)}
