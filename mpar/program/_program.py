"""The program as users hold it: its data, with methods to print, prove, predict, simulate and run it."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpar import forecast, plain, proof, runtime
from mpar.hardware import Hardware, hardware
from mpar.ir import CollectiveUse, ProgramData
from mpar.optimizer import Optimizer
from mpar.program._picture import picture
from mpar.program._text import text
from mpar.runtime import NO_LIMITS, Counter, Limits, Progress, RankRun, Replay, State
from mpar.schedules import Picture
from mpar.tree import Tree

__all__ = ["Program"]


class Program(ProgramData):
    """One training step of every rank: its data, to print, prove, predict, simulate and run."""

    @classmethod
    def of(cls, data: ProgramData) -> "Program":
        """The same program with the methods of this class."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})

    def to_plain(self, classes: Sequence[type] = ()) -> bytes:
        """The program as text: JSON and a checksum. Writing it again after `from_plain` gives the same bytes.

        classes: those of its optimizer, as `mpar.optim.CLASSES` has them for mpar's own; one of your own must be a dataclass of
        plain values. Raises PlainDataError for another optimizer.
        """
        return plain.to_text(Program, self, classes)

    @classmethod
    def from_plain(cls, text: bytes, classes: Sequence[type] = ()) -> "Program":
        """The program that `to_plain` wrote with the same `classes`. Reading runs no code, but running the program does: it holds
        generated Python, so read only what a user whom you trust wrote.

        Raises PlainDataError if the text is damaged, or if another version of mpar wrote it.
        """
        return plain.from_text(cls, text, classes)

    def with_optimizer(self, optimizer: Optimizer | None) -> "Program":
        """The same program with another learning rate, or none: ranks ask the optimizer only for that, all else is compiled."""
        return dataclasses.replace(self, facts=dataclasses.replace(self.facts, optimizer=optimizer))

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

    def simulate(self, state: State, batch: Mapping[str, Tensor], limits: Limits = NO_LIMITS) -> tuple[State, dict[str, Tensor]]:
        """One step of all ranks in this process, on a global state and batch; `state` is not changed. With a loss or a gradient
        norm that is not finite or exceeds `limits`, the new state has the values of the old one."""
        return runtime.simulate(self, state, batch, limits)

    def bind(
        self,
        *,
        device: torch.device | str = "cpu",
        order: str | None = None,
        counter: Counter | None = None,
        progress: Progress | None = None,
        transport: str | None = None,
        execution: str = "eager",
        timeout_s: float | None = None,
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
            timeout_s=timeout_s,
        )


def _profile(on: Hardware | str | None) -> Hardware | None:
    return hardware(on) if isinstance(on, str) else on
