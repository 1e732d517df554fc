"""Reported: the losses and metrics that segments have given so far; at the end of the step they are reported."""

from mpar.chain import HIGHEST
from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._writer import Writer
from mpar.ir import Piece

__all__ = ["Reported"]


class Reported:
    """The losses and metrics that segments have given so far.

    losses: for each piece and segment, the values of its losses.
    sums:   for each segment, the values of its metrics, added up over pieces, or the highest of them.
    """

    def __init__(self, writer: Writer, blueprint: Blueprint) -> None:
        self.writer, self.blueprint = writer, blueprint
        self.losses: dict[tuple[Piece, int], list[int]] = {}
        self.sums: dict[int, list[int]] = {}

    def names(self, segment: int, piece: Piece) -> list[str]:
        """Names for the values of a segment's losses and metrics."""
        traced = self.blueprint.codes[segment][0].traced
        return [f"{name}.{segment}.{self.blueprint.piece_name(piece)}" for name in (*traced.losses, *traced.metrics)]

    def take(self, segment: int, piece: Piece, values: list[int]) -> None:
        """Take a segment's losses, and join its metrics to those of other pieces."""
        traced = self.blueprint.codes[segment][0].traced
        num_losses = len(traced.losses)
        self.losses[piece, segment], metrics = values[:num_losses], values[num_losses:]
        if metrics and segment in self.sums:
            names = [f"{metric}.{segment}" for metric in traced.metrics]
            highest = [i for i, metric in enumerate(traced.metrics) if metric.endswith(HIGHEST)]
            of_segment = self.blueprint.segments[segment].name
            metrics = self.writer.add(self.sums[segment], metrics, names, of_segment, piece, highest=highest)
        self.sums[segment] = metrics
