"""Every private or unstable name of torch that mpar uses, in one place: to upgrade torch, edit this file.

Names that only the compiler needs are loaded when first used, so that a worker that runs a compiled program stays small.
"""

import importlib
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "current_autograd_node",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "fused_adamw_",
    "grouped_mm",
    "last_autograd_node",
    "pytree",
    "storage_key",
]

_LAZY = {
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "TorchFunctionMode": "torch.overrides",
    "UnsupportedFakeTensorException": "torch._subclasses.fake_tensor",
    "_core_aten_decompositions_post_autograd": "torch._decomp",
    "decomposition_table": "torch._decomp",
    "get_current_meta": "torch.fx.traceback",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "preserve_node_meta": "torch.fx.traceback",
}

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
fused_adamw_ = torch._fused_adamw_
grouped_mm = torch._grouped_mm


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def storage_key(x: torch.Tensor) -> int:
    """A number that identifies the storage of `x`: the same for all its views, and unique while one of them lives."""
    return x.untyped_storage()._cdata


def current_autograd_node() -> int | None:
    """The sequence number of the autograd node that is running backward in this thread, or None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def last_autograd_node() -> int:
    """The sequence number of the last autograd node that this thread has made."""
    return torch.autograd._get_sequence_nr() - 1
