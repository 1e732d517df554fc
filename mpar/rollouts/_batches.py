"""Batches of rollouts: what training reads, made of answers that the policy gives as training goes on."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpar.data import Batches, DocumentBatches
from mpar.errors import CheckpointError, NumericsError
from mpar.rollouts._advantages import with_token_advantages
from mpar.rollouts._draw import draw, numbers_of, with_advantages
from mpar.rollouts._drawing import Drawing, Measure
from mpar.rollouts._files import RolloutFile, RolloutHeader, read_rollouts, rollout_path, write_rollouts
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompts
from mpar.rollouts._rollout import Rollout

__all__ = ["RolloutBatches"]

ANSWER_KEYS: Mapping[str, tuple[torch.dtype, float]] = {"old_logps": (torch.float32, 0.0), "answers": (torch.int64, -1)}
TOKEN_KEYS: Mapping[str, str] = {"values": "old_values", "token_advantages": "token_advantages", "returns": "returns"}
"""What is known of the tokens of answers, and the keys of batches that have it."""


class RolloutBatches(Batches):
    """Batches of answers to prompts. A batch depends on the parameters, so `begin` must be called before each one.

    Every `plan.steps` steps answers are drawn with the parameters of that time, and kept in a file. A run that goes on between
    two such times reads them there; at such a time it draws the same ones again, because draws depend on seed, prompt and
    parameters alone.
    prompts: whose rows are prompts. rewards: what the rewards are, for the fingerprint.
    Prompts that are too long for the plan, and those without an answer where it reads answers, are left out and counted. Raises
    DataError if none is left.
    """

    def __init__(self, prompts: DocumentBatches, plan: RolloutPlan, *, rewards: str) -> None:
        self.plan, self._rewards = plan, rewards
        self.shape, self.seed, self.shuffle = plan.shape, prompts.seed, prompts.shuffle
        usable = Prompts(
            prompts.documents,
            seed=self.seed,
            shuffle=self.shuffle,
            max_tokens=plan.max_prompt_tokens,
            answered=plan.reads_answers,
        )
        self.prompts = usable.usable_of(prompts)
        self.pad_id, self.report = prompts.pad_id, self.prompts.report
        self._drawing: Drawing | None = None
        self._folder: Path | None = None
        self._number, self._rollouts = -1, tuple[Rollout, ...]()

    def draw_with(self, drawing: Drawing, folder: Path) -> None:
        """Draw with these from now on, and keep rollouts in `folder`."""
        self._drawing, self._folder = drawing, folder

    @functools.cached_property
    def questions(self) -> Prompts:
        """The prompts, without those that are too long, in the order in which they are answered."""
        return Prompts(self.prompts.documents, seed=self.seed, shuffle=self.shuffle)

    @property
    def data_fingerprint(self) -> str:
        """A hash of the prompts, the plan and the rewards."""
        content = f"({self.prompts.data_fingerprint!r}, {self.plan.fingerprint}, {self._rewards!r})"
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def reads_ahead(self) -> bool:
        """The next batch may need parameters that do not exist yet."""
        return False

    @property
    def lengths(self) -> NDArray[np.integer]:
        """The tokens of each prompt."""
        return self.prompts.lengths + 1

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which each prompt is answered about once."""
        return max(1, round(len(self.questions) / self.plan.num_groups * self.plan.steps))

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """The answers that were drawn last."""
        return self._rollouts

    def begin(self, step: int, params: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Make ready for the batch of `step`. Answers are drawn if it is time to, with `params`, by path; returns what is worth
        seeing of them.

        Raises RolloutError if they cannot be drawn or rewarded, and CheckpointError if those of before, which the step needs, are
        gone.
        """
        number = step // self.plan.steps
        if step % self.plan.steps == 0:
            return self._draw(number, step, params)
        if number != self._number:
            self._read(number)
        return {}

    def end(self, step: int, means: Mapping[str, float]) -> None:
        """Raise NumericsError if the first update after answers were drawn met other log-probabilities than the sampler: then the
        sampler and the trainer do not compute the same. means: the metrics of the task.
        """
        if step % self.plan.steps == 0 and means.get("apart", 0.0) > 0:
            raise NumericsError(
                f"training stopped: sampler and trainer are out of step. {means['apart']:.2%} of the tokens that were just drawn "
                f"have log-probabilities that differ by more than task.bar; the mean difference is {means.get('gap', 0.0):.3g}, "
                f"the largest {means.get('gap_highest', 0.0):.3g}.\n"
                "Both compute with the same parameters, so one of them is wrong, or rounds more than the bar allows: compare "
                "with precision=fp32, or raise task.bar."
            )

    def use(self, step: int) -> dict[str, tuple[int, int]]:
        """By the name of each source, the answers and tokens that `batch(step)` has of it."""
        found: dict[str, tuple[int, int]] = dict.fromkeys(self.prompts.documents.source_names, (0, 0))
        name = next(iter(found))
        rollouts = [item for row in range(self.shape.batch_size) for item in self._in_row(step, row)]
        return {**found, name: (len(rollouts), sum(item.num_positions for item in rollouts))}

    def names(self, step: int, row: int) -> list[str]:
        """Where the prompts of a row of `batch(step)` are from."""
        return [rollout.name for rollout in self._in_row(step, row)]

    def rows(self, step: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """These rows of `batch(step)`, with the keys of `Batches.batch`, and those of TOKEN_KEYS, (B, S), if they are known, and

        answers:    (B, S), the index in its row of the answer for which the label counts, else -1.
        old_logps:  (B, S), the log-probability of the label when it was drawn.
        advantages: (B, N), of each answer of a row. signs: (B, N), 1 where there is an answer to learn from, else -1.
        """
        made = super().rows(step, rows)
        size, count = (len(rows), self.shape.seq_len), self.plan.answers_per_row
        made |= {key: torch.full(size, fill, dtype=dtype) for key, (dtype, fill) in ANSWER_KEYS.items()}
        made |= {key: torch.zeros(size) for key in TOKEN_KEYS.values()}
        made |= {"advantages": torch.zeros(len(rows), count), "signs": torch.full((len(rows), count), -1)}
        for out, row in enumerate(rows):
            place = 0
            for index, rollout in enumerate(self._in_row(step, row)):
                begin, end = place + len(rollout.prompt_ids) - 1, place + rollout.num_positions
                if self.plan.learns_from(rollout):
                    made["answers"][out, begin:end] = torch.where(torch.tensor(rollout.drawn), index, -1)
                    if rollout.logps:
                        made["old_logps"][out, begin:end] = torch.tensor(rollout.logps)
                    for name in rollout.of_tokens.keys() & TOKEN_KEYS.keys():
                        made[TOKEN_KEYS[name]][out, begin:end] = torch.tensor(rollout.of_tokens[name])
                    made["advantages"][out, index] = rollout.advantage
                    made["signs"][out, index] = 1
                place = end
        return made

    def split(self, fraction: float) -> tuple["RolloutBatches", "RolloutBatches"]:
        """(training, validation): the prompts are split as `DocumentBatches.split` splits documents. Nothing is drawn for those
        of validation unless `HeldOut` asks for it.
        """
        training, held_out = (RolloutBatches(part, self.plan, rewards=self._rewards) for part in self.prompts.split(fraction))
        return training, held_out

    def _fill_row(self, step: int, row: int, arrays: dict[str, NDArray[Any]]) -> None:
        place = 0
        for index, rollout in enumerate(self._in_row(step, row)):
            ids = np.array((*rollout.prompt_ids, *rollout.answer_ids), np.int64)
            here = slice(place, place + rollout.num_positions)
            arrays["tokens"][here] = ids[:-1]
            arrays["positions"][here] = np.arange(rollout.num_positions)
            arrays["documents"][here] = index
            if self.plan.learns_from(rollout):
                begin = place + len(rollout.prompt_ids) - 1
                arrays["labels"][begin : here.stop][rollout.drawn] = np.array(rollout.answer_ids)[rollout.drawn]
            place = here.stop

    def _in_row(self, step: int, row: int) -> list[Rollout]:
        assert step // self.plan.steps == self._number, f"begin was not called for step {step}"
        return [self._rollouts[index] for index in self.plan.answers_of(step, row)]

    def _draw(self, number: int, step: int, params: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Draw rollout `number`, write it, and return what is worth seeing of it."""
        assert self._drawing is not None and self._folder is not None, "draw_with was not called"
        for sampler in (self._drawing.sampler, self._drawing.teacher):
            if sampler is not None:
                sampler.load(params)
        rollouts, problem = draw(self._drawing, number)
        numbers: Mapping[str, float] = {}
        if problem is None:
            rollouts = self._compared(number, rollouts, params)
            numbers = numbers_of(self.plan, rollouts)
        header = RolloutHeader(number, step, self.fingerprint, problem is None, numbers)
        if self._drawing.rank == 0:
            write_rollouts(self._folder, RolloutFile(header, tuple(rollouts)))
        if problem is not None:
            file = rollout_path(self._folder, number)
            raise type(problem)(f"{problem}\nThe answers are in {file}; a run that goes on draws the same ones again.")
        self._number, self._rollouts = number, tuple(rollouts)
        return numbers

    def _compared(self, number: int, rollouts: list[Rollout], params: Mapping[str, Tensor]) -> list[Rollout]:
        """The rollouts with advantages: of answers, and if the plan has them of tokens, with what is measured for that."""
        assert self._drawing is not None
        measure, by_token = self._drawing.measure, self.plan.by_token
        if measure is not None:
            self._number, self._rollouts = number, tuple(rollouts)
            rollouts = [rollout for step in range(self.plan.num_batches) for rollout in self._measured(step, measure, params)]
        if by_token is not None:
            return with_token_advantages(rollouts, [self.plan.learns_from(rollout) for rollout in rollouts], by_token)
        return with_advantages(self.plan, rollouts) if self.plan.rewarded else rollouts

    def _measured(self, step: int, measure: Measure, params: Mapping[str, Tensor]) -> Iterator[Rollout]:
        """The answers in a batch of the present rollout, with numbers of their tokens."""
        found = measure(params, self.batch(self._number * self.plan.steps + step))
        for row in range(self.shape.batch_size):
            place = 0
            for rollout in self._in_row(self._number * self.plan.steps + step, row):
                begin, place = place + len(rollout.prompt_ids) - 1, place + rollout.num_positions
                of_tokens = {name: tuple(x_BS[row, begin:place].tolist()) for name, x_BS in found.items()}
                yield replace(rollout, of_tokens=of_tokens)

    def _read(self, number: int) -> None:
        """The answers of a rollout that was drawn before this process began."""
        assert self._folder is not None, "draw_with was not called"
        path = rollout_path(self._folder, number)
        steps = f"{self.plan.steps} updates"
        if not path.is_file():
            raise CheckpointError(
                f"cannot go on: the answers for the next update were drawn earlier, for {steps}, and {path} is gone.\n"
                f"Go on from a checkpoint of a step that {self.plan.steps} divides, for which they are drawn again."
            )
        found = read_rollouts(path)
        if found.header.number != number or found.header.batches != self.fingerprint or not found.header.scored:
            raise CheckpointError(
                f"cannot go on: the answers in {path} are of another run, or were not rewarded.\n"
                f"Go on from a checkpoint of a step that {self.plan.steps} divides, for which they are drawn again."
            )
        self._number, self._rollouts = number, found.rollouts
