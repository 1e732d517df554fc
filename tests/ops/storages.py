"""What an implementation allocates: call it below this mode, not through its op, which is opaque to it."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The largest storage that an op has made, and the most that were alive after one, in bytes."""

    def __init__(self):
        super().__init__()
        self.alive, self.largest, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in before:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out
