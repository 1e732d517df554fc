"""The program as users hold it: the data, and everything that can be asked of it."""

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
        """The same program with these questions."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})

    def verify(self) -> None:
        """Raise ProgramError, naming the line, unless the program is well-formed; `mpar.proof.verify` says what that means."""
        proof.verify(self)

    def text(self, rank: int = 0, on: Hardware | str | None = None) -> str:
        """The program of one rank, a line an instruction, with bytes, and times if a profile is given."""
        return text(self, rank, _profile(on))

    def collectives(self, rank: int = 0) -> list[CollectiveUse]:
        """Every collective of a step of `rank` in order, those inside segments included."""
        return [use for instruction in self.part(rank).instructions for use in self.kinds[instruction.kind].collectives]

    def predict(self, on: Hardware | str | None = None) -> forecast.Prediction:
        """Peak bytes of a rank exactly, FLOPs and communication; times if a profile is given, or the name of one ("h200")."""
        return forecast.predict(self, _profile(on))

    def peaks(self) -> list[int]:
        """Peak bytes of a rank, per position along pp."""
        return [max((peak for peak, _ in forecast.memory_timeline(self, n)), default=0) for n in range(len(self.parts))]

    def picture(self, on: Hardware | str, title: str = "one step") -> Picture:
        """The predicted step as bars and memory curves, for `mpar.schedules.svg`, `html` and `chrome_trace`."""
        return picture(self, hardware(on) if isinstance(on, str) else on, title)

    def init_state(self, params: Tree, rank: int | None = None) -> State:
        """The state before the first step, from global parameters or DTensors; `rank` None: global, for `simulate`."""
        return runtime.init_state(self, params, rank)

    def simulate(self, state: State, batch: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        """One step of all ranks in this process, on a global state and batch; `state` is left as it was."""
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
        """This process's rank, ready to run on the processes of torch.distributed; `mpar.runtime.bind` has details."""
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
