"""Every private or unstable torch name that mpar uses, in one place: a torch upgrade is an edit of this file.

Light enough for a worker that only runs a compiled program; what only the compiler needs is in `sharding/_torch_private.py`.
"""

import torch
from torch.utils import _pytree as pytree

__all__ = ["is_fake", "pytree", "storage_key"]


def is_fake(x: torch.Tensor) -> bool:
    """Whether `x` carries no data: a meta tensor, or one of torch's fake tensors."""
    return x.device.type == "meta" or hasattr(x, "fake_mode")


def storage_key(x: torch.Tensor) -> int:
    """Identity of the storage behind `x`, equal for all views of it; valid while one of them lives."""
    return x.untyped_storage()._cdata
