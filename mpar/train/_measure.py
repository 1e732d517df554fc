"""Numbers of the positions of rows, by a program of forwards: what a task measures of answers, or scores."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.program import Program, RankRun, Replay, State, batch_rows, positions_in_order

__all__ = ["Measuring"]


@dataclass(frozen=True)
class Measuring:
    """What a rank measures with. program: of `mpar.tasks.Measured`, and how this rank runs it."""

    program: Program
    run: RankRun | Replay
    rank: int
    device: torch.device

    @classmethod
    def of(cls, program: Program, rank: int, device: torch.device, timeout_s: float) -> "Measuring":
        """With a run of its own."""
        return cls(program, program.bind(device=device, timeout_s=timeout_s), rank, device)

    def __call__(self, leaves: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results for a global batch, (B, S), on the CPU; all ranks call this together. leaves: by their paths in the state,
        those that this rank has."""
        program = self.program
        state = State({leaf.path: leaves[leaf.path] for leaf in program.part(self.rank).state_in})
        size = next(leaf.shape[0] for leaf in program.batch if len(leaf.shape) > 1)
        read = {key: x for key, x in batch.items() if key in program.facts.batch}
        pieces: dict[str, list[Tensor]] = {}
        for begin in range(0, len(next(iter(read.values()))), size):
            local = batch_rows(program, {key: x[begin : begin + size] for key, x in read.items()}, self.rank)
            state, results = self.run(state, {key: x.to(self.device) for key, x in local.items()})
            for name, x_BS in results.items():
                if x_BS.ndim < 2:  # the program reports a loss, too, which is zero
                    continue
                pieces.setdefault(name, []).append(positions_in_order(program, x_BS).cpu())
        return {name: torch.cat(parts) for name, parts in pieces.items()}
