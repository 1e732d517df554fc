"""The private torch names that only the compiler needs; a process that runs a compiled program never imports this file."""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "UnsupportedFakeTensorException",
    "current_autograd_node",
    "get_current_meta",
    "last_autograd_node",
    "make_fx",
    "preserve_node_meta",
]


def current_autograd_node() -> int | None:
    """The sequence number of the autograd node that is running backward in this thread, or None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def last_autograd_node() -> int:
    """The sequence number of the last autograd node that this thread has made."""
    return torch.autograd._get_sequence_nr() - 1
