"""Stage costs: the predicted seconds and bytes of each stage's forward and backward, which schedules are chosen by."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mpar.compiler.build._segments import SegmentCodes
from mpar.compiler.segment import SegmentCode, split_segment
from mpar.hardware import Hardware
from mpar.ir import Kind, segment_time
from mpar.mesh import Mesh
from mpar.schedules import Costs

__all__ = ["StageCosts"]


@dataclass(frozen=True)
class _Stage:
    """The predicted costs of a stage with one microbatch.

    forward, backward:       seconds of each.
    input_half, weight_half: seconds of the two halves of the backward.
    activation:              bytes that are held from the forward until the backward.
    weight_part:             bytes of these that are held further, from the input half until the weight half.
    transfer:                seconds until the next stage has what this one sends.
    """

    forward: float
    backward: float
    input_half: float
    weight_half: float
    activation: int
    weight_part: int
    transfer: float


@dataclass(frozen=True)
class StageCosts:
    """Predicts costs on `hardware`."""

    codes: SegmentCodes
    mesh: Mesh
    hardware: Hardware

    def segment_seconds(self) -> list[float]:
        """For each segment, the seconds of the forwards and backwards of all its slices."""
        return [sum(self._seconds(half.kind) for code in slices for half in code.halves) for slices in self.codes.by_segment]

    def of(self, ranges: Sequence[range], *, split: bool) -> Costs:
        """The costs of the stages with these ranges of segments.

        split: whether the schedule splits backwards into I and W. If it does not, I and W are not compiled, each counts as half
        of the backward, and a segment that returns losses but no x runs forward and backward as one. The backward of a stage that
        gives no gradient of its input is all W, because no stage waits for it; this is so in the first stage.
        """
        stages = [self._stage(segments, split=split) for segments in ranges]
        return Costs(
            [stage.forward for stage in stages],
            [stage.input_half for stage in stages],
            [stage.weight_half for stage in stages],
            backward=[stage.backward for stage in stages],
            transfer=[stage.transfer for stage in stages[:-1]],
            activation=[stage.activation for stage in stages],
            weight_part=[stage.weight_part for stage in stages],
        )

    def _stage(self, segments: range, *, split: bool) -> _Stage:
        codes = [code for index in segments for code in self.codes.by_segment[index]]
        separate = [code for code in codes if split or code.joint is None]
        backwards = [code.backward if split else code.joint or code.backward for code in codes]
        backward = sum(self._seconds(code.kind) for code in backwards if code is not None)
        activation = sum(_bytes(code.forward.out_values) for code in separate if code.backward is not None)
        all_weight = not self.codes.returns_gradients(segments)
        input_half, weight_half, held = self._halves(codes, backward, activation, split=split, all_weight=all_weight)
        x = [v for code in self.codes.by_segment[segments[-1]] for v in code.traced.x_out] if len(segments) else []
        return _Stage(
            forward=sum(self._seconds(code.forward.kind) for code in separate),
            backward=backward,
            input_half=input_half,
            weight_half=weight_half,
            activation=activation,
            weight_part=min(held, activation),
            transfer=self.hardware.link_latency_s + _bytes(x) / self.hardware.link_bytes_per_s,
        )

    def _halves(
        self, codes: Sequence[SegmentCode], backward: float, activation: int, *, split: bool, all_weight: bool
    ) -> tuple[float, float, int]:
        """Seconds of the input half and of the weight half of a backward, and the bytes that are held until the weight half."""
        if all_weight:
            return 0.0, backward, activation
        if not split:
            return backward / 2, backward / 2, activation
        halves = [split_segment(code) for code in codes if code.backward is not None]
        held = sum(_bytes(half.weight.in_values) for half in halves) if halves else activation
        input_half = sum(self._seconds(half.input.kind) for half in halves)
        return input_half, sum(self._seconds(half.weight.kind) for half in halves), held

    def _seconds(self, kind: Kind) -> float:
        return segment_time(kind, self.mesh, self.hardware)


def _bytes(values: Sequence[Tensor]) -> int:
    return sum(value.nbytes for value in values)
