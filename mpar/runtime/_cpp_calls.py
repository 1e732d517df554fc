"""C++ calls: a step is recorded as the calls of C++ that it makes, and replayed as one.

The weights that a step reads flush the caches, so each line of Python between two calls of C++ waits for memory.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from mpar.cpp import MOST_OPERANDS, calls_of_thread, new_calls
from mpar.torch_private import OpOverload, TorchDispatchMode, inductor_kernels_replaced

__all__ = ["cpp_calls"]

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_HOST_READS = frozenset({"__array__", "__dlpack__", "numpy", "tolist", "untyped_storage"})


class _NotRecordableError(Exception):
    """Work does more than to call functions of C++ and to allocate their operands."""


def cpp_calls(work: Callable[[], None], given: Sequence[Tensor] = ()) -> Callable[[], bool] | None:
    """Record the functions of C++, mpar's and Inductor's, that `work` calls on this thread; none of them runs.

    Tensors that it allocates are kept, and written by each replay. None if `work` does more than to call such functions and to
    allocate and view tensors: if it calls other ops of torch, or reads numbers on the host, but for what it assumes of numbers
    in the tensors `given`. Then it has had no effect. A replay returns False, and does nothing, if what is assumed does not hold.
    """
    calls = new_calls()
    if calls is None:
        return None
    try:
        with calls.of_this_thread(), inductor_kernels_replaced(_written_down) as is_kernel, _refusing(is_kernel), _NoOps():
            work()
    except _NotRecordableError:
        return None
    memory = {x.untyped_storage().data_ptr() for x in given}
    return calls if all(x.untyped_storage().data_ptr() in memory for x in calls.assumed) else None


def _written_down(kernel: Callable[..., None], address: int) -> Callable[..., None]:
    """What is called in place of a kernel of Inductor."""

    def call(*operands: Tensor | int) -> None:
        calls = calls_of_thread()
        if calls is None:  # on another thread
            kernel(*operands)
        elif len(operands) <= MOST_OPERANDS and all(isinstance(x, Tensor | int) for x in operands):
            calls.add(address, operands)
        else:
            raise _NotRecordableError

    return call


class _NoOps(TorchDispatchMode):
    """In this context, ops may allocate and view tensors, and nothing else."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func._schema.name.removeprefix("aten::") not in _ALLOCATIONS:
            raise _NotRecordableError
        return func(*args, **(kwargs or {}))


@contextmanager
def _refusing(is_kernel: Callable[[object], bool]) -> Iterator[None]:
    """In this context, no function may be called that reads a tensor's numbers without an op, nor a kernel of Inductor itself."""

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            name = getattr(called, "__name__", "")
            if (name in _HOST_READS and isinstance(getattr(called, "__self__", None), Tensor)) or is_kernel(called):
                raise _NotRecordableError

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
