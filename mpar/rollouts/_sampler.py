"""The sampler: what draws answers from the policy. mpar's own is its engine, with the tensors that training updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from mpar.infer import Engine, Runner, Sampling

__all__ = ["Ask", "Drawn", "EngineSampler", "Sampler"]

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Ask:
    """A prompt to be answered. Draws depend on the seed, on `choice`, on the number of each token and on nothing else. greedy:
    nothing is drawn, each token is the likeliest one. max_tokens: the most tokens of the answer; None: as many as the sampler
    allows."""

    prompt: tuple[int, ...]
    seed: int
    choice: int
    greedy: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True)
class Drawn:
    """An answer: its tokens, with the one that ended it; the log-probability of each under the full distribution at temperature
    1, from which they were drawn unless they are the likeliest ones; `finish` is `stop`, or `length` if there was no room for
    more."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish: str


class Sampler(Protocol):
    """Draws answers from the policy. Whoever brings another engine implements these two functions."""

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Draw with these parameters from now on: tensors by path, which later updates of the training do not change. Nothing
        computed with earlier ones may be used any more."""

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """An answer to each."""


class EngineSampler:
    """Draws with an engine. make_runner: makes its runner of the first parameters. eos_ids: tokens that end an answer.
    max_tokens: the most tokens of one."""

    def __init__(self, make_runner: Callable[[Mapping[str, Tensor]], Runner], eos_ids: Sequence[int], max_tokens: int) -> None:
        self._make_runner, self._eos_ids, self._max_tokens = make_runner, tuple(eos_ids), max_tokens
        self._engine: Engine | None = None

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Sampler`. The engine reads the tensors of the training: nothing is copied, unless in bfloat16 on a CPU."""
        if self._engine is None:
            self._engine = Engine(self._make_runner(params), eos_ids=self._eos_ids)
        self._engine.runner.load(params)
        self._engine.forget()

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """See `Sampler`."""
        engine = self._engine
        assert engine is not None, "load was not called"
        requests = [
            engine.add(
                ask.prompt,
                Sampling(
                    max_tokens=min(self._max_tokens, ask.max_tokens or self._max_tokens),
                    temperature=0.0 if ask.greedy else 1.0,
                    seed=ask.seed & _MAX_SEED,
                    num_alternatives=0,
                ),
                ask.choice,
            )
            for ask in asks
        ]
        for _ in engine.run():
            pass
        return [
            Drawn(
                tuple(chosen.token for chosen in request.chosen),
                tuple(cast(float, chosen.logprob) for chosen in request.chosen),  # `num_alternatives` asks for them
                str(request.finish),
            )
            for request in requests
        ]
