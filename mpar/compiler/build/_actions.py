"""What the actions of a part share: the writer, what waits, parameters, contexts, gradients and reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._contexts import Contexts
from mpar.compiler.build._gathers import Gathers
from mpar.compiler.build._gradients import Gradients
from mpar.compiler.build._position import Position
from mpar.compiler.build._reported import Reported
from mpar.compiler.build._waiting import Edges, Waiting
from mpar.compiler.build._writer import Writer
from mpar.ir import Piece, SegmentResult

__all__ = ["Actions"]


@dataclass(frozen=True)
class Actions:
    """What is shared by all that is written of one part.

    cotangent:    the value of one over the weight of the batch, which every loss is multiplied by.
    joint_losses: losses that backwards give, where forward and backward are one.
    carried:      what slices give later ones to read.
    """

    position: Position
    writer: Writer
    edges: Edges
    contexts: Contexts
    gathers: Gathers
    gradients: Gradients
    reported: Reported
    cotangent: int
    joint_losses: dict[int, SegmentResult] = field(default_factory=dict)
    carried: dict[int, SegmentResult] = field(default_factory=dict)

    @property
    def blueprint(self) -> Blueprint:
        """The step that the part belongs to."""
        return self.position.blueprint

    def segments_of(self, stage: int) -> range:
        """The numbers of the segments of a stage."""
        return self.blueprint.pipeline.ranges[stage]

    def fetch(self, waiting: list[Waiting], segment: int, microbatch: int, slices: Sequence[int]) -> None:
        """Bring slices back from the host: the first is needed now, the others are then on their way."""
        for c in slices:
            if 0 <= c < len(waiting):
                waiting[c] = waiting[c].fetched(self.writer, self.blueprint.segments[segment].name, Piece(microbatch, c))

    def until_next_segment(self, values: list[int], segment: int, piece: Piece, *, ends_stage: bool) -> Waiting:
        """What a slice gives the segment that follows, which begins when all slices of this one are done."""
        waiting = Waiting(values)
        options = self.blueprint.options
        if not options.recompute.offload or options.num_slices == 1 or ends_stage:
            return waiting
        return waiting.offloaded(self.writer, self.blueprint.segments[segment].name, piece)

    def hand_back(self, stage: int, microbatch: int, input_gradients: list[Waiting]) -> None:
        """A stage has the gradients of its input: where the stage before it is here too, it needs no message."""
        self.edges.input_gradients[stage, microbatch] = input_gradients
        if self.position.runs(stage - 1, microbatch):
            self.edges.cotangents[stage - 1, microbatch] = input_gradients
