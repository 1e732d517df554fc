"""Every private or unstable name of torch that mpar uses, in one place: to upgrade torch, edit this file.

Names that only the compiler needs are loaded when first used, so that a worker that runs a compiled program stays small.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "checkpoint_disabled",
    "current_autograd_node",
    "defunctionalise",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "functionalise",
    "fused_adamw_",
    "grouped_mm",
    "is_functional",
    "last_autograd_node",
    "original_views",
    "pytree",
    "quiet_errors",
    "storage_key",
    "was_written",
]

_LAZY = {
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "FunctionalTensorMode": "torch._subclasses.functional_tensor",
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


def original_views() -> contextlib.AbstractContextManager[None]:
    """In this context the gradient of a write into a view repeats the view; otherwise it would read memory by strides."""
    return torch.autograd._force_original_view_tracking(True)


@contextlib.contextmanager
def checkpoint_disabled() -> Iterator[None]:
    """In this context `torch.utils.checkpoint` calls the function. Its hooks do not work inside transforms of `torch.func`."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    saved = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator, module.CheckpointFunction = _yield_once, _PlainCall
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = saved


def _yield_once(*_: object, **__: object) -> Iterator[None]:
    yield


class _PlainCall:
    @staticmethod
    def apply(fn: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        return fn(*args)


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """In this context torch does not log errors of tensors without data, with tracebacks, beside raising them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def functionalise(x: torch.Tensor) -> torch.Tensor:
    """`x` as a tensor for which torch replaces writes by ops that return their result; a `FunctionalTensorMode` is active."""
    return importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor.to_functional(x)


def defunctionalise(x: torch.Tensor) -> torch.Tensor:
    """The tensor behind a functional one, after all writes into it; other tensors are returned as they are."""
    if not is_functional(x):
        return x
    torch._sync(x)
    return importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor.from_functional(x)


def is_functional(x: torch.Tensor) -> bool:
    """Whether `x` is what `functionalise` returns, or computed from it while a `FunctionalTensorMode` was active."""
    return isinstance(x, importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor)


def was_written(x: torch.Tensor) -> bool:
    """Whether data, shape or strides of a functional tensor, or data of another one of the same storage, were changed in place.

    `x` may be wrapped by transforms of `torch.func`.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    inner = getattr(x, "elem", None)
    if inner is None or not torch._is_functional_tensor(inner):
        return False
    in_data: Callable[[torch.Tensor], bool] = getattr(torch, "_functionalize_has_data_mutation")  # noqa: B009  torch's stubs lack it
    return in_data(inner) or torch._functionalize_has_metadata_mutation(inner)
