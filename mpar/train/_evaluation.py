"""Evaluation: the loss on data that are not trained on, by a program of forwards that reads the parameters of the training."""

import math
from dataclasses import dataclass

import torch

from mpar.data import Batches
from mpar.program import Program, RankRun, Replay, State
from mpar.train._local_batch import LocalBatches
from mpar.train._watch import Watch

__all__ = ["Evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """What one rank evaluates with.

    every: evaluate after every so many steps; None: only at the end. num_batches: how many batches each evaluation reads.
    """

    program: Program
    run: RankRun | Replay
    batches: Batches
    every: int | None
    num_batches: int

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate after `step` of a run that ends with step `last`."""
        return step == last or (self.every is not None and step % self.every == 0)

    def loss(self, state: State, rank: int, device: torch.device, watch: Watch) -> float:
        """The mean loss over all labels in the batches. All ranks must call this together. `state` is not changed."""
        total = weight = 0.0
        params = [leaf.path for leaf in self.program.part(rank).state_in]
        with LocalBatches(self.program, self.batches, rank, device) as local:
            for number in range(self.num_batches):
                batch = local.take(number, following=number + 1 if number + 1 < self.num_batches else None)
                watch.begin_evaluation()
                _, metrics = self.run(State({path: state.leaves[path] for path in params}, state.step), batch)
                watch.between_steps(state.step)
                total += float(metrics["loss"]) * float(metrics["weight"])
                weight += float(metrics["weight"])
        return total / weight if weight else math.nan
