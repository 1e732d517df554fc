"""A copy of a rank's shards in the memory of the host, in the order of its file. The memory is kept from save to save."""

import mmap
import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mpar.checkpoint._layout import DTYPES, Layout, Shard

__all__ = ["Staging"]


class Staging:
    """The buffer. Its pages are fetched by a thread as soon as it is made: the first save shall not wait for the system to find
    memory, and a rank whose host lacks it learns so at once, not at its first checkpoint.

    shards: what will be copied, by the names of the tensors. planned: the layout of a file that holds them, at any step.
    device: that of the tensors to come; from CUDA they are copied into pinned memory.
    """

    def __init__(self, shards: Mapping[str, Shard], planned: Layout, device: torch.device) -> None:
        start = len(planned.header)
        self.slots = {name: (begin - start, begin - start + shards[name].num_bytes) for name, begin in planned.begins.items()}
        """For each tensor the first byte of its shard in the buffer, and the byte behind the last."""
        self._shards, self._device = shards, device
        self._event: torch.cuda.Event | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._failure: BaseException | None = None
        self._fetching = threading.Thread(target=self._fetch, name="checkpoint memory", daemon=True)
        self._fetching.start()

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the shards of these tensors. From CUDA the copies are queued on the current stream; `settle` waits for them."""
        self._fetching.join()
        if self._failure is not None:
            raise self._failure
        for name, (begin, end) in self.slots.items():
            target, source = self._buffer[begin:end], tensors[name].detach()
            if source.device.type == "cpu" and source.is_contiguous():
                np.copyto(target.numpy(), source.reshape(-1).view(torch.uint8).numpy())  # half the time of Tensor.copy_
            else:
                shard = self._shards[name]
                target.view(DTYPES[shard.dtype][0]).view(shard.shape).copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def settle(self) -> None:
        """Wait until the copies have arrived."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def buffer(self) -> memoryview:
        """All bytes in order."""
        return self._buffer.numpy().data

    def _fetch(self) -> None:
        try:
            self._buffer = _allocate(max((end for _, end in self.slots.values()), default=0), self._device)
        except (RuntimeError, OSError, MemoryError) as error:
            self._failure = error


def _allocate(size: int, device: torch.device) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # which shared memory does not take
    pages = np.frombuffer(memory, dtype=np.uint8)
    pages.fill(0)
    return torch.from_numpy(pages)
