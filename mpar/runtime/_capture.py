"""Capture: a whole step is recorded once and then replayed: on a GPU as a CUDA graph, so that the host launches one graph instead
of many kernels, on a CPU as calls of C++.

What was recorded reads and writes fixed addresses. So state, batch and scalars are in tensors that are never replaced: each batch
is copied into them, the state is updated in them, and metrics are copied out.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpar.runtime._rank_run import RankRun
from mpar.runtime._state import NO_LIMITS, Limits, State

__all__ = ["Replay", "cuda_graph"]

Capture = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], bool] | None]
"""`capture(work, given)` records what `work` does, without its effects, and returns a function that does it; None if it cannot.
The function returns False, and does nothing, if `work` would do something else with the numbers that `given` have by then."""


def cuda_graph(work: Callable[[], None], given: Sequence[Tensor]) -> Callable[[], bool]:
    """Record the kernels that `work` launches, on the current stream and on others that wait for it and that it waits for. No
    number may decide which these are."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> bool:
        graph.replay()
        return True

    return replay


class Replay:
    """A rank's step with fixed memory. The first call runs normally and loads kernels and libraries; the second is recorded. If
    that cannot be, all run normally."""

    def __init__(self, run: RankRun, capture: Capture = cuda_graph) -> None:
        self.run, self.capture = run, capture
        self.calls, self.is_recordable = 0, True
        self.forget()

    def forget(self) -> None:
        """Give up what was recorded, and its tensors; the next call records anew."""
        self.state: dict[str, Tensor] = {}
        self.batch: dict[str, Tensor] = {}
        self.scalars: list[Tensor] = []
        self.metrics: dict[str, Tensor] = {}
        self.replay: Callable[[], bool] | None = None

    def __call__(
        self, state: State, batch: Mapping[str, Tensor], limits: Limits = NO_LIMITS
    ) -> tuple[State, dict[str, Tensor]]:
        """One step, like `RankRun`; from the second call on, the new state is in the same tensors."""
        self.calls += 1
        if self.calls == 1 or not self.is_recordable:
            return self.run(state, batch, limits)
        is_known = self._holds(state.leaves)
        numbers = self.run.begin(state, batch, limits, checks_state=not is_known)
        leaves = state.take()
        if self.replay is None and not self._record(leaves, batch):
            return self.run(State(leaves, state.step, state.skipped), batch, limits)
        for path, leaf in () if is_known else leaves.items():
            if not _same_memory(leaf, self.state[path]):  # it does not come from the call before, but from a checkpoint
                self.state[path].copy_(leaf)
        for key, rows in batch.items():
            self.batch[key].copy_(rows)
        for scalar, number in zip(self.scalars, numbers, strict=True):
            scalar.copy_(number) if isinstance(number, Tensor) else scalar.fill_(number)
        assert self.replay is not None
        with _on(self.run.device):
            if not self.replay():
                return self.run(State(leaves, state.step, state.skipped), batch, limits)
        metrics = {path: value.clone() for path, value in self.metrics.items()}
        return self.run.end(dict(self.state), metrics, numbers[0], state)

    def _holds(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors of the state that was recorded, in its order."""
        return len(leaves) == len(self.state) and all(map(operator.is_, leaves.values(), self.state.values()))

    def _record(self, leaves: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> bool:
        """Record a step; False if it cannot be recorded, which is not tried again."""
        self.state = dict(leaves)
        self.batch = {key: rows.clone() for key, rows in batch.items()}
        self.scalars = [torch.zeros((), dtype=leaf.dtype, device=self.run.device) for leaf in self.run.part.scalars]

        def work() -> None:
            new, self.metrics = self.run.execute(dict(self.state), self.batch, self.scalars)
            for path, leaf in new.items():
                if not _same_memory(leaf, self.state[path]):
                    self.state[path].copy_(leaf)

        with _on(self.run.device):
            self.replay = self.capture(work, tuple(self.batch.values()))
        if self.replay is None:
            self.forget()
            self.is_recordable = False
        return self.is_recordable


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two leaves of one path are the same numbers at the same addresses."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
