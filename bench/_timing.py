"""Timing on a GPU: events around every call, a flushed cache before it, variants in turn; ceilings of the machine first."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Times", "ceilings", "free", "graph_ms", "peak_bytes", "time_in_turn"]

DEVICE = "cuda"
FLUSH_BYTES = 256 << 20
"""More than any cache of a GPU holds, so that a kernel does not find there what its last call has read."""
WARMUP_MS, REPEAT_MS, ROUNDS = 50.0, 200.0, 2
FEWEST, MOST = 5, 400
SHORT_MS = 0.1
"""A shorter call is timed in a CUDA graph too, because launching it takes as long as running it."""


@dataclass
class Times:
    """Milliseconds of every call, by round."""

    rounds: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Median, 20 % and 80 % quantiles over all rounds, and each round's median."""
        times = sorted(time for round_ in self.rounds for time in round_)
        low, high = (times[int(share * (len(times) - 1))] for share in (0.2, 0.8))
        rounds = [statistics.median(round_) for round_ in self.rounds]
        return {"ms": statistics.median(times), "q20": low, "q80": high, "rounds": rounds, "calls": len(times)}


def time_in_turn(variants: Mapping[str, Callable[[], Any]], *, share: float = 1.0) -> dict[str, Times]:
    """Time variants in rounds, A B A B, so that a machine that gets slower does so for all. `share` shortens the rounds."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=DEVICE)
    found = {name: Times() for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            found[name].rounds.append(_one_round(run, flush, share))
    return found


def _one_round(run: Callable[[], Any], flush: torch.Tensor, share: float) -> list[float]:
    run()
    estimate = max(_timed([run] * 3, flush)[-1], 1e-3)
    for _ in range(max(1, min(MOST, int(share * WARMUP_MS / estimate)))):
        run()
    return _timed([run] * max(FEWEST, min(MOST, int(share * REPEAT_MS / ROUNDS / estimate))), flush)


def _timed(runs: Sequence[Callable[[], Any]], flush: torch.Tensor) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs]
    for run, (start, end) in zip(runs, pairs, strict=True):
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def graph_ms(run: Callable[[], Any], calls: int = 20) -> float:
    """Milliseconds of one call, where `calls` are replayed from a CUDA graph without flushing: the median of ten replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The peak of allocated memory during a call, in bytes more than before it."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings(size: int = 8192, copy_bytes: int = 8 << 30) -> dict[str, float]:
    """What this machine reaches: bytes read and written per second by a copy; FLOP/s of a bfloat16 product of random numbers."""
    source = torch.empty(copy_bytes // 8, dtype=torch.int32, device=DEVICE).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    times = time_in_turn({"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b, out=product)})
    copy_s, product_s = (1e-3 * times[name].summary()["ms"] for name in ("copy", "product"))
    return {"copy_bytes_per_s": 2 * source.nbytes / copy_s, "flops_per_s": 2 * size**3 / product_s}


def free() -> None:
    """Give memory that is no longer used back to the device."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
