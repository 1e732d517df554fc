"""An independent count of memory: every storage that torch ops make, held by weak references, looked at after each op."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mpar import tree


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all live storages that it has seen; `peak` is the most there were after any op.

    A primitive is one op to it (its inside is below this mode), and so is a collective (`outside`). What instructions put into
    the memory of the host is not counted, if `follow` is told of every instruction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(out)
        return out

    def follow(self, line: int, step: Any) -> None:
        """An instruction of a program begins."""
        self.away = step.op == "offload"

    def add(self, values: Any) -> None:
        """Notice tensors, then count what is alive."""
        if self.away:
            return
        for value in tree.leaves(values):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                known = self.seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.live)

    @property
    def live(self) -> int:
        """Bytes of live storages."""
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())


class PoolTracker(StorageTracker):
    """Counts the bytes of each queue's storages: a storage belongs to the queue of the instruction in which it is first seen.

    queues: for each line its queue. peaks: the most bytes of each queue's storages after any op.
    """

    def __init__(self, queues: list[str]) -> None:
        super().__init__()
        self.queues, self.queue = queues, queues[0]
        self.home: dict[int, tuple[StorageWeakRef, str]] = {}
        self.peaks: Counter[str] = Counter()

    def follow(self, line: int, step: Any) -> None:
        """An instruction of a program begins."""
        self.queue = self.queues[line]

    def add(self, values: Any) -> None:
        """Notice tensors, then count what is alive in each pool."""
        super().add(values)
        live: Counter[str] = Counter()
        for key, (reference, nbytes) in self.seen.items():
            if key not in self.home or self.home[key][0] is not reference:
                self.home[key] = (reference, self.queue)
            live[self.home[key][1]] += nbytes
        self.peaks |= live


class TrackedComm:
    """A communicator whose inside the tracker does not see, and whose results it does."""

    def __init__(self, inner: Any, tracker: StorageTracker) -> None:
        self.inner, self.tracker = inner, tracker

    def index(self, axes: tuple[str, ...]) -> int:
        return self.inner.index(axes)

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self.inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                out = collective(*args, **kwargs)
            self.tracker.add(out)
            return out

        return call
