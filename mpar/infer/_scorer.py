"""Scorer: the log-probabilities of the tokens of texts by compiled programs, on one rank or on all ranks of a mesh."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.infer._scores import Scores
from mpar.models import ScoredDecoder, Trainable
from mpar.program import Program, RankRun, Replay, State, batch_rows

__all__ = ["Scorer"]

_SHORTEST, _GROWTH = 64, 4
"""The length of the shortest program, and how much longer the next one is: less padding, but more to compile."""


class Scorer:
    """Scores texts by compiled programs, each for one length of texts and one number of likeliest tokens. A text is computed as a
    whole, without a cache. With several ranks all must call it with the same arguments.

    length:  the most tokens of a text that are read. unit: programs have a multiple of so many.
    groups:  how many texts are computed at the same time.
    compile: makes the program of a chain. bind: makes it ready to run.
    compiling: is told when a program is compiled, and until it has run for the first time.
    """

    def __init__(
        self,
        model: Trainable,
        length: int,
        unit: int,
        groups: int,
        compile: Callable[[ScoredDecoder], Program],
        bind: Callable[[Program], RankRun | Replay],
        device: torch.device,
        compiling: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.model, self.groups, self.device = model.without_multi_token(), groups, device
        self.length, self._unit = length, unit
        self._compile, self._bind, self._compiling = compile, bind, compiling
        self._runs: dict[ScoredDecoder, tuple[Program, RankRun | Replay]] = {}

    def __call__(
        self, leaves: Mapping[str, Tensor], texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0
    ) -> list[Scores]:
        """The scores of texts of at least two tokens each, with the parameters among the leaves of this rank's state, and the
        adapter of the number `adapter`; 0: none.

        Raises ConfigError for a text that is too long.
        """
        longest = max(len(text) for text in texts) - 1
        if longest > self.length:
            raise ConfigError(f"cannot score a text of {longest + 1} tokens: at most {self.length + 1} fit here.")
        count = min(num_likeliest, self.model.vocab_size)
        chain = ScoredDecoder(self.model, self._length_for(longest), self.groups, count)
        parts = [texts[begin : begin + self.groups] for begin in range(0, len(texts), self.groups)]
        return [scores for part in parts for scores in self._score(chain, leaves, part, adapter)]

    def _length_for(self, count: int) -> int:
        length = _SHORTEST
        while length < count:
            length *= _GROWTH
        return -(-min(length, self.length) // self._unit) * self._unit

    def _score(
        self, chain: ScoredDecoder, leaves: Mapping[str, Tensor], texts: Sequence[Tensor], adapter: int
    ) -> list[Scores]:
        """The scores of at most `groups` texts, which are the rows of a batch."""
        is_new = chain not in self._runs
        with self._compiling(f"texts of up to {chain.length} tokens") if is_new else nullcontext():
            if is_new:
                program = self._compile(chain)
                self._runs[chain] = program, self._bind(program)
            return self._run(chain, leaves, texts, adapter)

    def _run(
        self, chain: ScoredDecoder, leaves: Mapping[str, Tensor], texts: Sequence[Tensor], adapter: int
    ) -> list[Scores]:
        program, run = self._runs[chain]
        rank = torch.distributed.get_rank() if program.mesh.size > 1 else 0
        batch = {key: torch.zeros(self.groups, chain.length, dtype=torch.int64) for key in chain.batch_axes}
        for row, text in enumerate(texts):
            batch["tokens"][row, : len(text) - 1], batch["labels"][row, : len(text) - 1] = text[:-1], text[1:]
        if "adapters" in batch:
            batch["adapters"].fill_(adapter)
        mine = {key: x.to(self.device) for key, x in batch_rows(program, batch, rank).items()}
        _, results = run(State({leaf.path: leaves[leaf.path] for leaf in program.part(rank).state_in}), mine)
        names = ("logprobs", "likeliest", "likeliest_logprobs")
        return [Scores(*(results[key][row, : len(text) - 1].cpu() for key in names)) for row, text in enumerate(texts)]
