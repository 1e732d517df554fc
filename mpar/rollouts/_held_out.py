"""Held-out prompts: what the policy answers to questions that it does not learn from, and what these answers are worth."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mpar.rollouts._draw import answer_numbers, answered
from mpar.rollouts._drawing import Drawing, Question, draw_seed
from mpar.rollouts._files import RolloutFile, RolloutHeader, write_rollouts
from mpar.rollouts._prompts import Prompts
from mpar.rollouts._rollout import Rollout

__all__ = ["HELD_OUT_FOLDER", "HeldOut"]

HELD_OUT_FOLDER = "held_out"
"""Where in the folder of rollouts the answers to held-out prompts are."""


@dataclass(frozen=True)
class HeldOut:
    """Prompts that are not learned from, and how they are answered.

    sets:        the prompts, by the name of their set. num_prompts: how many of each are answered, the first ones; None: all.
    num_answers: to each prompt, drawn at temperature 1; None: one, of the likeliest tokens.
    drawing:     what answers are drawn and rewarded with. folder: where answers are kept, one file for each time.

    A draw depends on the seed of the run, the set, the place of the prompt in it and the number of the answer, and not on the
    step. So what changes from one time to the next is the policy alone, and training draws the same answers as without this.
    """

    sets: Mapping[str, Prompts]
    drawing: Drawing
    folder: Path
    num_answers: int | None = None
    num_prompts: int | None = None

    def measure(self, step: int, params: Mapping[str, Tensor]) -> dict[str, float]:
        """The numbers of `answer_numbers` after `step` updates, of all answers together and, named SET/NUMBER, of each of several
        sets. All ranks call this together; `params` are those that this rank has, by path.

        Raises RolloutError if they cannot be drawn or rewarded; what there is of them is in the folder then, too.
        """
        drawing, size = self.drawing, self.num_answers or 1
        drawing.sampler.load(params)
        asked = [item for name in self.sets for item in self._questions(name)]
        groups, problem = answered(drawing, [question for _, question in asked], size, greedy=self.num_answers is None)
        rollouts = [rollout for index in sorted(groups) for rollout in groups[index]]
        numbers = {} if problem is not None else self._numbers([name for name, _ in asked for _ in range(size)], rollouts)
        if drawing.rank == 0:
            write_rollouts(self.folder, RolloutFile(RolloutHeader(step, step, "", problem is None, numbers), tuple(rollouts)))
        if problem is not None:
            raise type(problem)(f"{problem}\nThese answers are to held-out prompts, and are in {self.folder}.")
        return numbers

    def _questions(self, name: str) -> Iterator[tuple[str, Question]]:
        """The prompts of a set with its name."""
        prompts = self.sets[name]
        for index in range(min(len(prompts), self.num_prompts or len(prompts))):
            yield name, Question(prompts.take(index), index, draw_seed(self.drawing.seed, "held_out", name, index))

    def _numbers(self, names: list[str], rollouts: list[Rollout]) -> dict[str, float]:
        found = answer_numbers(rollouts)
        if len(self.sets) > 1:
            for name in self.sets:
                of_set = [rollout for own, rollout in zip(names, rollouts, strict=True) if own == name]
                found |= {f"{name}/{number}": value for number, value in answer_numbers(of_set).items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}
