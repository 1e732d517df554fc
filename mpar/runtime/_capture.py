"""Capture: a whole step is recorded once as a CUDA graph and then replayed: the host launches one graph instead of many kernels.

A graph reads and writes fixed addresses. So state, batch and scalars are in tensors that are never replaced: every batch is
copied into them, the state is updated in them, and metrics are copied out.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpar.runtime._rank_run import RankRun
from mpar.runtime._state import NO_LIMITS, Limits, State

__all__ = ["Replay", "cuda_graph"]

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""`capture(work)` records what `work` does, without its effects, and returns a function that does it."""


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Record the kernels that `work` launches, on the current stream and on others that wait for it and that it waits for."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class Replay:
    """A rank's step with fixed memory. The first call runs normally and loads kernels and libraries; the second is recorded."""

    def __init__(self, run: RankRun, capture: Capture = cuda_graph) -> None:
        self.run, self.capture = run, capture
        self.calls = 0
        self.state: dict[str, Tensor] = {}
        self.batch: dict[str, Tensor] = {}
        self.scalars: list[Tensor] = []
        self.metrics: dict[str, Tensor] = {}
        self.replay: Callable[[], None] | None = None

    def __call__(
        self, state: State, batch: Mapping[str, Tensor], limits: Limits = NO_LIMITS
    ) -> tuple[State, dict[str, Tensor]]:
        """One step, like `RankRun`; from the second call on, the new state is in the same tensors."""
        self.calls += 1
        if self.calls == 1:
            return self.run(state, batch, limits)
        numbers = self.run.begin(state, batch, limits)
        leaves = state.take()
        if self.replay is None:
            self._record(leaves, batch)
        for path, leaf in leaves.items():
            if not _same_memory(leaf, self.state[path]):  # it does not come from the call before, but from a checkpoint
                self.state[path].copy_(leaf)
        for key, rows in batch.items():
            self.batch[key].copy_(rows)
        for scalar, number in zip(self.scalars, numbers, strict=True):
            scalar.copy_(number) if isinstance(number, Tensor) else scalar.fill_(number)
        assert self.replay is not None
        with _on(self.run.device):
            self.replay()
        metrics = {path: value.clone() for path, value in self.metrics.items()}
        return self.run.end(dict(self.state), metrics, numbers[0], state)

    def _record(self, leaves: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        self.state = dict(leaves)
        self.batch = {key: rows.clone() for key, rows in batch.items()}
        self.scalars = [torch.zeros((), dtype=leaf.dtype, device=self.run.device) for leaf in self.run.part.scalars]

        def work() -> None:
            new, self.metrics = self.run.execute(dict(self.state), self.batch, self.scalars)
            for path, leaf in new.items():
                if not _same_memory(leaf, self.state[path]):
                    self.state[path].copy_(leaf)

        with _on(self.run.device):
            self.replay = self.capture(work)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two leaves of one path are the same numbers at the same addresses."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
