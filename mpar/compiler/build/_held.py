"""Held: values that wait for a later instruction of their part, on the device or, if the policy says so, in the host's memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpar.compiler.build._writer import Writer

__all__ = ["Held", "LeftGradients", "Saved"]


class Held:
    """Some values; `away`: they are in the host's memory."""

    def __init__(self, values: Sequence[int] = (), *, away: bool = False) -> None:
        self.values, self.away = list(values), away

    def sent(self, writer: Writer, segment: str, piece: int) -> "Held":
        """A copy in the host's memory; these stay where they are until nothing reads them."""
        if self.away:
            return self
        return Held([writer.carry("offload", v, segment, piece) for v in self.values], away=True)

    def fetched(self, writer: Writer, segment: str, piece: int) -> "Held":
        """A copy on the device, these themselves if they are there."""
        if not self.away:
            return self
        return Held([writer.carry("fetch", v, segment, piece) for v in self.values])


@dataclass
class Saved:
    """What the forward of a segment leaves for its backward, a slice at a time; and what the input half of that leaves.

    x: the segment's input; kept: what it kept; left: what later slices read of this one.
    """

    x: Held
    kept: Held = field(default_factory=Held)
    left: Held = field(default_factory=Held)
    dy: list[int] | None = None
    crossing: list[int] | None = None


class LeftGradients:
    """Gradients of what the slices of one segment left, which later slices give, last first, and which are added up."""

    def __init__(self, writer: Writer, segment: str, num_left: int) -> None:
        self.writer, self.segment, self.num_left = writer, segment, num_left
        self.sums: dict[int, list[int]] = {}

    def take(self, c: int) -> list[int]:
        """The finished ones of slice `c`; none if no slice has read what it left."""
        return self.sums.pop(c, [])

    def add(self, c: int, first: int, past: Sequence[int], grads: list[int]) -> None:
        """Those that slice `c` gives to each slice in `past`; `first` is the number of their microbatch's first piece."""
        for j in past:
            new, grads = grads[: self.num_left], grads[self.num_left :]
            names = [f"dleft {self.segment}"] * self.num_left
            self.sums[j] = self.writer.add(self.sums[j], new, names, self.segment, first + c) if j in self.sums else new
