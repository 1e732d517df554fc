"""Actions: what is shared by the functions that write the actions of a part, such as the writer and the values that wait."""

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
    """What the functions that write the actions of one part share.

    edges:        the values that wait between actions.
    cotangent:    the value that holds the reciprocal of the batch's weight, which is the cotangent of every loss; None without
                  losses.
    joint_reports: which loss or metric a value is, for those of segments whose forward and backward are one instruction.
    carried:      which result a value is, for every value that a slice hands to later slices.
    state:        for each segment that keeps state, the values of its leaves: the old ones until its forward is written.
    """

    position: Position
    writer: Writer
    edges: Edges
    contexts: Contexts
    gathers: Gathers
    gradients: Gradients
    reported: Reported
    cotangent: int | None
    state: dict[int, list[int]]
    joint_reports: dict[int, SegmentResult] = field(default_factory=dict)
    carried: dict[int, SegmentResult] = field(default_factory=dict)

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint of the program that the part belongs to."""
        return self.position.blueprint

    def segments_of(self, stage: int) -> range:
        """The numbers of the segments of a stage."""
        return self.blueprint.pipeline.ranges[stage]

    def fetch(self, waiting: list[Waiting], segment: int, microbatch: int, slices: Sequence[int]) -> None:
        """Write the fetches of values that wait in the host's memory, for those of `slices` that exist.

        Callers name the slice that they need now and the one that they need next, which is fetched while this one computes.
        """
        for c in slices:
            if 0 <= c < len(waiting):
                waiting[c] = waiting[c].fetched(self.writer, self.blueprint.segments[segment].name, Piece(microbatch, c))

    def until_next_segment(self, values: list[int], segment: int, piece: Piece, *, ends_stage: bool) -> Waiting:
        """Let what a slice gives to the following segment wait until all slices of this segment are done.

        It waits in the host's memory if the recompute policy offloads, unless there is only one slice or the stage ends here.
        """
        waiting = Waiting(values)
        options = self.blueprint.options
        if not options.recompute.offload or options.num_slices == 1 or ends_stage:
            return waiting
        return waiting.offloaded(self.writer, self.blueprint.segments[segment].name, piece)

    def hand_back(self, stage: int, microbatch: int, input_gradients: list[Waiting]) -> None:
        """Note the gradients of a stage's input. If this position also runs the stage before it, that stage reads them without a
        message."""
        self.edges.input_gradients[stage, microbatch] = input_gradients
        if self.position.runs(stage - 1, microbatch):
            self.edges.cotangents[stage - 1, microbatch] = input_gradients
