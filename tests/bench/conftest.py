"""A GPU that is not there."""

import contextlib
import types

import pytest
import torch

from bench import _timing

__all__ = ["Gpu"]


class Gpu:
    """A GPU on which a call takes as long as it says, in milliseconds."""

    def __init__(self) -> None:
        self.now, self.flushed, self.allocated, self.peak, self.total = 0.0, 0, 0, 0, 1 << 40

    def takes(self, ms: float):
        """A call."""

        def call() -> None:
            self.now += ms

        return call

    def event(self, enable_timing: bool):
        """A mark of the clock."""
        mark = types.SimpleNamespace(at=None)
        mark.record = lambda: setattr(mark, "at", self.now)
        mark.elapsed_time = lambda end: end.at - mark.at
        return mark


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    """Torch has this GPU, and its tensors are on the CPU."""
    fake = Gpu()
    graph = types.SimpleNamespace(ms=0.0)
    graph.replay = lambda: fake.takes(graph.ms)()

    @contextlib.contextmanager
    def captured(made):
        before = fake.now
        yield
        made.ms, fake.now = fake.now - before, before

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    stubs = {
        "Event": fake.event,
        "synchronize": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": lambda: graph,
        "graph": captured,
        "memory_allocated": lambda: fake.allocated,
        "max_memory_allocated": lambda: fake.peak,
        "reset_peak_memory_stats": lambda: setattr(fake, "peak", fake.allocated),
        "get_device_name": lambda: "a chip",
        "memory_reserved": lambda: fake.allocated,
        "max_memory_reserved": lambda: fake.peak,
        "get_device_properties": lambda device: types.SimpleNamespace(total_memory=fake.total),
        "empty_cache": lambda: None,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(_timing, "DEVICE", "cpu")
    monkeypatch.setattr(_timing, "FLUSH_BYTES", 64)
    return fake
