"""Row: one line of the table of kernels: how to make operands, our kernel and its peers, and which bars it must reach."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tools.kernel_shapes import Shape

__all__ = [
    "Bar",
    "Built",
    "Measured",
    "Row",
    "Setting",
    "Variant",
    "at_most_ms",
    "attempt",
    "either",
    "extra_memory",
    "of_copy",
    "of_floor",
    "tflops",
    "times",
]

Select = Callable[[Any], Sequence[Tensor]]


@dataclass(frozen=True)
class Setting:
    """Where a row runs: a GPU, or a CPU where kernels are interpreted and nothing is timed."""

    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Random normal numbers, not zeros: kernels run faster on constant data than on random data."""
        numbers = torch.empty(shape, dtype=torch.float32 if dtype.itemsize < 2 else dtype, device=self.device)
        return numbers.normal_(0.0, scale, generator=self.generator).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Random integers, uniform in [0, high)."""
        return torch.randint(high, shape, dtype=dtype, device=self.device, generator=self.generator)

    def compiled(self, fn: Callable) -> Callable:
        """`torch.compile(fn)` on a GPU; `fn` itself where nothing is timed."""
        return torch.compile(fn, dynamic=False) if self.device.type == "cuda" else fn


@dataclass(frozen=True)
class Variant:
    """One way to compute the row's results. `select` picks those that the reference has; None: they are just these."""

    run: Callable[[], Any]
    select: Select | None = None


@dataclass(frozen=True)
class Built:
    """A row with operands. In place of a peer that cannot run here, `peers` has the reason in words.

    reference: computes the expected results in float64, or parts of them; it is called before anything else runs.
    bytes, flops: the fewest that the work needs.
    rate: how many times faster than bfloat16 the chip multiplies operands of this row's dtype.
    tolerance: the relative error that results may have; None: that of their dtype.
    """

    ours: Variant
    peers: Mapping[str, Variant | str]
    reference: Callable[[], Sequence[Tensor]]
    bytes: int
    flops: int = 0
    rate: float = 1.0
    tolerance: float | None = None


@dataclass(frozen=True)
class Measured:
    """Figures of one row: milliseconds and extra peak bytes by variant ("ours" or a peer), and the machine's ceilings."""

    ms: Mapping[str, float]
    graph_ms: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    bytes: int
    flops: int
    copy_bytes_per_s: float
    flops_per_s: float  # of products of operands of the row's dtype

    @property
    def floor_ms(self) -> float:
        """The shortest possible time: that of memory or of arithmetic, whichever is longer, at the machine's ceilings."""
        return 1e3 * max(self.bytes / self.copy_bytes_per_s, self.flops / self.flops_per_s)

    def best_peer(self) -> str | None:
        """The fastest peer."""
        return min((name for name in self.ms if name != "ours"), key=self.ms.__getitem__, default=None)


@dataclass(frozen=True)
class Bar:
    """A demand on a row. `reached` computes the figure that is compared, or None where it was not measured."""

    text: str
    reached: Callable[[Measured], float | None]
    limit: float
    at_most: bool = False
    alternatives: Sequence["Bar"] = field(default_factory=tuple)

    def verdict(self, measured: Measured) -> str:
        """Met or missed, with the figure, or not measured."""
        if self.alternatives:
            verdicts = [bar.verdict(measured) for bar in self.alternatives]
            found = next((verdict for verdict in verdicts if verdict.startswith("met")), None)
            return found or next((verdict for verdict in verdicts if verdict.startswith("missed")), verdicts[0])
        value = self.reached(measured)
        if value is None:
            return "not measured"
        met = value <= self.limit if self.at_most else value >= self.limit
        return f"{'met' if met else 'missed'} ({value:.3g})"


@dataclass(frozen=True)
class Row:
    """`build(setting, **sizes)` makes the operands, with the sizes of `shape` or, for the interpreter, with its tiny ones.

    number: its number in the table, which several rows may share. missing: why it cannot be measured at all.
    """

    number: int
    name: str
    build: Callable[..., Built] | None
    shape: Shape
    bars: Sequence[Bar] = ()
    dtype: str = "bfloat16"
    missing: str = ""

    @property
    def key(self) -> str:
        """A name that no other row has."""
        return f"{self.number} {self.name}, {', '.join(f'{k} {v}' for k, v in self.shape.sizes.items())}, {self.dtype}"

    def about(self) -> dict[str, Any]:
        """The part of a line of results that says which row it is about."""
        return {"row": self.key, "number": self.number, "name": self.name, "dtype": self.dtype, "shape": dict(self.shape.sizes)}


def attempt(make: Callable[[], Variant | str]) -> Variant | str:
    """A peer, or in words why it cannot be made, so that only its own column is missing."""
    try:
        return make()
    except Exception as error:  # of software that is not ours
        return f"cannot be made: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"


def times(peer: str, limit: float) -> Bar:
    """Our speed is at least `limit` times that of the fastest measured peer whose name starts with `peer`."""

    def reached(measured: Measured) -> float | None:
        found = [ms for name, ms in measured.ms.items() if name != "ours" and name.startswith(peer)]
        return min(found) / measured.ms["ours"] if found and "ours" in measured.ms else None

    return Bar(f">= {limit:.2f}x {peer or 'the best peer'}", reached, limit)


def of_copy(limit: float) -> Bar:
    """The fewest bytes that are needed, divided by our time, are at least `limit` of the bandwidth of a copy."""
    return Bar(f">= {limit:.2f} of copy", lambda m: _share(m.bytes / m.copy_bytes_per_s, m), limit)


def of_floor(limit: float) -> Bar:
    """The shortest possible time (`floor_ms`), divided by ours, is at least `limit`."""
    return Bar(f">= {limit:.2f} of the floor", lambda m: _share(1e-3 * m.floor_ms, m), limit)


def tflops(limit: float) -> Bar:
    """We reach `limit` TFLOP/s."""
    return Bar(f">= {limit:.0f} TFLOP/s", lambda m: _share(1e-12 * m.flops, m), limit)


def at_most_ms(limit: float) -> Bar:
    """Replayed from a CUDA graph, our call takes at most `limit` milliseconds."""
    return Bar(f"<= {limit:g} ms in a graph", lambda m: m.graph_ms.get("ours"), limit, at_most=True)


def extra_memory(peer: str, limit: float) -> Bar:
    """Our peak of memory beyond the operands is at most `limit` times a peer's."""

    def reached(measured: Measured) -> float | None:
        peaks = measured.peak_bytes
        return peaks["ours"] / peaks[peer] if peaks.get(peer) and "ours" in peaks else None

    return Bar(f"<= {limit:.2f}x memory of {peer}", reached, limit, at_most=True)


def either(*bars: Bar) -> Bar:
    """At least one of these bars is met."""
    return Bar(" or ".join(bar.text for bar in bars), lambda _: None, 0.0, alternatives=bars)


def _share(amount: float, measured: Measured) -> float | None:
    return amount / (1e-3 * measured.ms["ours"]) if "ours" in measured.ms else None
