"""Waiting: values that wait for later actions of their part, on the device or, if the recompute policy offloads, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpar.compiler.build._writer import Writer
from mpar.ir import Piece

__all__ = ["CarriedGradients", "Edges", "Saved", "Waiting"]


class Waiting:
    """Values that wait for a later action; -1 stands for one that the action does not read.

    on_host: whether they are in the host's memory.
    """

    def __init__(self, values: Sequence[int] = (), *, on_host: bool = False) -> None:
        self.values, self.on_host = list(values), on_host

    def offloaded(self, writer: Writer, segment: str, piece: Piece) -> "Waiting":
        """Write copies of the values to the host's memory. The originals are freed when nothing reads them any more."""
        if self.on_host:
            return self
        return Waiting([v if v < 0 else writer.copy("offload", v, segment, piece) for v in self.values], on_host=True)

    def fetched(self, writer: Writer, segment: str, piece: Piece) -> "Waiting":
        """Write copies of the values to the device; if they are on the device already, they are returned as they are."""
        if not self.on_host:
            return self
        return Waiting([v if v < 0 else writer.copy("fetch", v, segment, piece) for v in self.values])


@dataclass
class Saved:
    """What is saved of one slice of a segment for its backward.

    x:        the input of the segment.
    kept:     the values that its forward kept.
    carried:  what it carried over to later slices.
    dy:       the cotangents of its results, saved when its backward begins.
    crossing: what the input half of its backward computed for the weight half, saved between the two.
    """

    x: Waiting
    kept: Waiting = field(default_factory=Waiting)
    carried: Waiting = field(default_factory=Waiting)
    dy: list[int] | None = None
    crossing: list[int] | None = None

    def offloaded(self, writer: Writer, segment: str, piece: Piece) -> "Saved":
        """Write copies of x, kept and carried to the host's memory."""
        x, kept, carried = (waiting.offloaded(writer, segment, piece) for waiting in (self.x, self.kept, self.carried))
        return Saved(x, kept, carried)


@dataclass(frozen=True)
class Edges:
    """The values that wait between the actions of a part.

    Keys are (stage, microbatch), except in `messages`. Lists of `Waiting` have an entry for each slice.

    inputs, outputs: the x that enters a stage, and the x that leaves it.
    cotangents:      the gradients of what leaves a stage.
    input_gradients: the gradients of what enters it.
    messages:        for each number of a transfer, the values that it carries.
    saved:           for each (segment, slice), what is saved for its backward.
    """

    num_slices: int
    inputs: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    outputs: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    cotangents: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    messages: dict[int, list[int]] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[tuple[int, int], Saved]] = field(default_factory=dict)

    def nothing(self) -> list[Waiting]:
        """An empty list of values for each slice."""
        return [Waiting() for _ in range(self.num_slices)]


class CarriedGradients:
    """The gradients of what the slices of one segment carried over. Each later slice that read it gives a term; terms are added.

    num_carried: for each slice, how many of the values that it carried over have a gradient.
    sums:        for each slice, the sums so far.
    """

    def __init__(self, writer: Writer, segment: str, num_carried: Sequence[int]) -> None:
        self.writer, self.segment, self.num_carried = writer, segment, num_carried
        self.sums: dict[Piece, list[int]] = {}

    def take(self, piece: Piece) -> list[int]:
        """The finished gradients of what `piece` carried over; none if no slice has read it."""
        return self.sums.pop(piece, [])

    def add(self, piece: Piece, past: Sequence[Piece], grads: list[int]) -> None:
        """Add the gradients that `piece` gives for what each slice in `past` carried over."""
        for earlier in past:
            number = self.num_carried[earlier.slice]
            new, grads = grads[:number], grads[number:]
            names = [f"dcarried {self.segment}"] * number
            if new and earlier in self.sums:
                new = self.writer.add(self.sums[earlier], new, names, self.segment, piece)
            self.sums[earlier] = new
