"""The program as users hold it: its data, with methods to print, prove, predict, simulate and run it."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from mpar import forecast, proof, runtime
from mpar.hardware import Hardware, hardware
from mpar.ir import CollectiveUse, ProgramData
from mpar.program._picture import picture
from mpar.program._text import text
from mpar.runtime import Counter, Progress, RankRun, Replay, State
from mpar.schedules import Picture
from mpar.tree import Tree

__all__ = ["Program"]


class Program(ProgramData):
    """One training step of every rank: its data, to print, prove, predict, simulate and run."""

    @classmethod
    def of(cls, data: ProgramData) -> "Program":
        """The same program with the methods of this class."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})

    def verify(self) -> None:
        """Raise ProgramError, naming the line, unless the program is valid; `mpar.proof.verify` says what is checked."""
        proof.verify(self)

    def text(self, rank: int = 0, on: Hardware | str | None = None) -> str:
        """The program of one rank, one line for each instruction, with bytes, and times if a profile or its name is given."""
        return text(self, rank, _profile(on))

    def collectives(self, rank: int = 0) -> list[CollectiveUse]:
        """Every collective of a step of `rank`, in order, including those inside segments."""
        return [use for instruction in self.part(rank).instructions for use in self.kinds[instruction.kind].collectives]

    def predict(self, on: Hardware | str | None = None) -> forecast.Prediction:
        """Memory, FLOPs and communication of a step; times if a hardware profile or its name ("h200") is given."""
        return forecast.predict(self, _profile(on))

    def peaks(self) -> list[int]:
        """Peak bytes of a rank, per position along pp."""
        return [max((peak for peak, _ in forecast.memory_timeline(self, n)), default=0) for n in range(len(self.parts))]

    def picture(self, on: Hardware | str, title: str = "one step") -> Picture:
        """The predicted step as bars and memory curves, for `mpar.schedules.svg`, `html` and `chrome_trace`."""
        return picture(self, hardware(on) if isinstance(on, str) else on, title)

    def init_state(self, params: Tree, rank: int | None = None) -> State:
        """The state of a rank before the first step, from global parameters or DTensors; None: a global state, for `simulate`."""
        return runtime.init_state(self, params, rank)

    def simulate(self, state: State, batch: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        """One step of all ranks in this process, on a global state and batch; `state` is not changed."""
        return runtime.simulate(self, state, batch)

    def bind(
        self,
        *,
        device: torch.device | str = "cpu",
        order: str | None = None,
        counter: Counter | None = None,
        progress: Progress | None = None,
        transport: str | None = None,
        execution: str = "eager",
    ) -> RankRun | Replay:
        """The rank of this process, ready to run on the processes of torch.distributed; see `mpar.runtime.bind`."""
        return runtime.bind(
            self,
            device=device,
            order=order,
            counter=counter,
            progress=progress,
            transport=transport,
            execution=execution,
        )


def _profile(on: Hardware | str | None) -> Hardware | None:
    return hardware(on) if isinstance(on, str) else on
