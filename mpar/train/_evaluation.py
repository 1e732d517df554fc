"""Evaluation: the loss on data that are not trained on, by a program of forwards that reads the parameters of the training; or
what answers to prompts are worth that are not trained on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpar.data import Batches
from mpar.program import Program, RankRun, Replay, State
from mpar.rollouts import HeldOut
from mpar.tasks import MEAN, task_means
from mpar.train._local_batch import LocalBatches
from mpar.train._place import Phase
from mpar.train._state import PARAMS
from mpar.train._watch import Watch

__all__ = ["EvalLosses", "Evaluation", "HeldOutEvaluation", "params_of"]


@dataclass(frozen=True)
class EvalLosses:
    """The mean loss over the labels of all sets together, and of each set; and the means that a task reports, over all sets.

    mean: None if answers are rewarded, whose rewards are among `task_means`.
    """

    mean: float | None
    of_set: Mapping[str, float] = field(default_factory=dict)
    task_means: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What one rank evaluates with.

    sets: the batches to evaluate on, by name. every: evaluate after every so many steps; None: only at the end. num_batches: how
    many batches of each set an evaluation reads; None: all.
    """

    program: Program
    run: RankRun | Replay
    sets: Mapping[str, Batches]
    every: int | None
    num_batches: int | None = None

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate after `step` of a run that ends with step `last`."""
        return is_due(self.every, step, last)

    def losses(self, state: State, step: int, rank: int, device: torch.device, watch: Watch) -> EvalLosses:
        """The mean loss over all labels of each set, after `step` updates. All ranks must call this together. `state` is not
        changed."""
        reported: dict[str, Tensor] = {}
        sums = {name: self._sum(batches, state, rank, device, watch, reported) for name, batches in self.sets.items()}
        total, weight = (math.fsum(parts) for parts in zip(*sums.values(), strict=True))
        return EvalLosses(_mean(total, weight), {name: _mean(*parts) for name, parts in sums.items()}, task_means(reported))

    def _sum(
        self,
        batches: Batches,
        state: State,
        rank: int,
        device: torch.device,
        watch: Watch,
        reported: dict[str, Tensor],
    ) -> tuple[float, float]:
        """(the sum of the losses of all labels, what they weigh) in one set. Sums that a task reports are added to `reported`."""
        total = weight = 0.0
        count = min(count for count in (self.num_batches, batches.steps_per_epoch) if count is not None)
        params = [leaf.path for leaf in self.program.part(rank).state_in]
        with LocalBatches(self.program, batches, rank, device) as local:
            for number in range(count):
                batch = local.take(number, following=number + 1 if number + 1 < count else None)
                watch.begin_evaluation()
                _, metrics = self.run(State({path: state.leaves[path] for path in params}, state.step), batch)
                watch.between_steps(state.step)
                total += float(metrics["loss"]) * float(metrics["weight"])
                weight += float(metrics["weight"])
                for name in (name for name in metrics if name.endswith(MEAN)):
                    sums = metrics[name].to(torch.float64)
                    reported[name] = reported[name] + sums if name in reported else sums
        return total, weight


@dataclass(frozen=True)
class HeldOutEvaluation:
    """What one rank evaluates with where answers are drawn: the held-out prompts are answered, and the answers are rewarded.

    every: as of `Evaluation`.
    """

    held_out: HeldOut
    every: int | None

    def is_due(self, step: int, last: int) -> bool:
        """See `Evaluation`."""
        return is_due(self.every, step, last)

    def losses(self, state: State, step: int, rank: int, device: torch.device, watch: Watch) -> EvalLosses:
        """What the answers after `step` updates are worth, under `task_means`. All ranks call this together. Raises RolloutError
        if they cannot be rewarded."""
        watch.enter(Phase.BATCH)
        numbers = self.held_out.measure(step, params_of(state))
        watch.between_steps(step)
        return EvalLosses(None, task_means=numbers)


def is_due(every: int | None, step: int, last: int) -> bool:
    """Whether to evaluate after `step` of a run that ends with step `last`."""
    return step == last or (every is not None and step % every == 0)


def params_of(state: State) -> dict[str, Tensor]:
    """The parameters that a rank has, by their paths in the tree of the chain."""
    return {path.removeprefix(PARAMS): leaf for path, leaf in state.leaves.items() if path.startswith(PARAMS)}


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
