"""The meshes on which every task and every adapter must give what one rank gives: each direction alone, and mixed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpar import Mesh
from mpar.chain import Chain
from mpar.compiler import Schedule
from mpar.program import Program
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.program.oracle import Recorder

__all__ = ["MESHES", "Place", "in_four_stages"]


@dataclass(frozen=True)
class Place:
    """A mesh, how a model lies on it, and the schedule of its stages.

    strategy: the name of a preset. expert_parallel: over how many ranks the experts of a model are spread; 1: the model has none.
    """

    mesh: Mesh
    strategy: str
    expert_parallel: int = 1
    schedule: Schedule | None = None

    @property
    def num_layers(self) -> int:
        """Of the model: as many as its stages need."""
        return 2 if self.num_microbatches > 1 else 1

    @property
    def num_microbatches(self) -> int:
        """Stages take two microbatches."""
        return 1 if self.mesh.axis_size("pp") == 1 else 2

    def compile(self, chain: Chain, shapes: Any, **how: Any) -> Program:
        """The training step of a chain, with an optimizer that shows gradients."""
        strategy = replace(preset(self.strategy), expert_parallel=self.expert_parallel)
        how = {"num_microbatches": self.num_microbatches, "schedule": self.schedule, **how}
        return compile_step(chain, Recorder(), self.mesh, strategy, shapes, **how)


def in_four_stages(name: str) -> Schedule:
    """A schedule with two chunks on each of two positions along pp."""
    return Schedule(name, None, "E|t|t|L")


MESHES: Mapping[str, Place] = {
    "dp": Place(Mesh(dp=4), "ddp"),
    "fsdp": Place(Mesh(fsdp=4), "zero3"),
    "dp fsdp": Place(Mesh(dp=2, fsdp=2), "zero2"),
    "tp sp": Place(Mesh(tp=2), "tp_sp"),
    "fsdp tp sp": Place(Mesh(fsdp=2, tp=2), "zero3_tp_sp"),
    "cp": Place(Mesh(cp=2), "zero3"),
    "cp tp sp": Place(Mesh(cp=2, tp=2), "zero1_tp_sp"),
    "pp zbv": Place(Mesh(pp=2), "ddp", schedule=in_four_stages("zbv")),
    "pp fsdp": Place(Mesh(pp=2, fsdp=2), "zero3", schedule=Schedule("one_f_one_b")),
    "pp tp sp": Place(Mesh(pp=2, tp=2), "tp_sp", schedule=in_four_stages("interleaved")),
    "ep cp": Place(Mesh(fsdp=2, cp=2), "zero3", expert_parallel=4),
    "ep pp zbv": Place(Mesh(pp=2, fsdp=2), "zero3", expert_parallel=2, schedule=in_four_stages("zbv")),
}
