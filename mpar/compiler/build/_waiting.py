"""Values that wait for a later instruction of their part, on the device or, if the policy says so, in the host's memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpar.compiler.build._writer import Writer
from mpar.ir import Piece

__all__ = ["CarriedGradients", "Edges", "Saved", "Waiting"]


class Waiting:
    """Some values; `on_host`: they are in the host's memory."""

    def __init__(self, values: Sequence[int] = (), *, on_host: bool = False) -> None:
        self.values, self.on_host = list(values), on_host

    def offloaded(self, writer: Writer, segment: str, piece: Piece) -> "Waiting":
        """A copy in the host's memory; these stay where they are until nothing reads them."""
        if self.on_host:
            return self
        return Waiting([writer.copy("offload", v, segment, piece) for v in self.values], on_host=True)

    def fetched(self, writer: Writer, segment: str, piece: Piece) -> "Waiting":
        """A copy on the device, these themselves if they are there."""
        if not self.on_host:
            return self
        return Waiting([writer.copy("fetch", v, segment, piece) for v in self.values])


@dataclass
class Saved:
    """What the forward of a segment leaves for its backward, a slice at a time; and what the input half of that leaves.

    x: the segment's input; kept: what it kept; carried: what later slices read of this one. dy: the cotangents of its results;
    crossing: what the input half of its backward made for the weight half.
    """

    x: Waiting
    kept: Waiting = field(default_factory=Waiting)
    carried: Waiting = field(default_factory=Waiting)
    dy: list[int] | None = None
    crossing: list[int] | None = None

    def offloaded(self, writer: Writer, segment: str, piece: Piece) -> "Saved":
        """The same in the host's memory."""
        x, kept, carried = (waiting.offloaded(writer, segment, piece) for waiting in (self.x, self.kept, self.carried))
        return Saved(x, kept, carried)


@dataclass(frozen=True)
class Edges:
    """What waits between the actions of a part, by (stage, microbatch) and slice by slice.

    inputs, outputs: x that enters a stage and that leaves it; cotangents, input_gradients: their gradients. messages: the values
    that each transfer carries. saved: by segment and slice, what forwards leave for backwards.
    """

    num_slices: int
    inputs: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    outputs: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    cotangents: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], list[Waiting]] = field(default_factory=dict)
    messages: dict[int, list[int]] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[tuple[int, int], Saved]] = field(default_factory=dict)

    def nothing(self) -> list[Waiting]:
        """No values, for each slice."""
        return [Waiting() for _ in range(self.num_slices)]


class CarriedGradients:
    """Gradients of what the slices of one segment carried over, which later slices give, last first, and which are added up."""

    def __init__(self, writer: Writer, segment: str, num_carried: int) -> None:
        self.writer, self.segment, self.num_carried = writer, segment, num_carried
        self.sums: dict[Piece, list[int]] = {}

    def take(self, piece: Piece) -> list[int]:
        """The finished ones of `piece`; none if no slice has read what it carried over."""
        return self.sums.pop(piece, [])

    def add(self, piece: Piece, past: Sequence[Piece], grads: list[int]) -> None:
        """Those that `piece` gives to each slice in `past`."""
        for earlier in past:
            new, grads = grads[: self.num_carried], grads[self.num_carried :]
            names = [f"dcarried {self.segment}"] * self.num_carried
            if earlier in self.sums:
                new = self.writer.add(self.sums[earlier], new, names, self.segment, piece)
            self.sums[earlier] = new
