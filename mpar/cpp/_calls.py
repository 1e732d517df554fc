"""Calls: what a thread calls of C++, written down to be called again, in the same order and without Python in between."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

__all__ = ["MOST_OPERANDS", "Calls", "Operand", "address_of", "after_calls", "assume", "calls_of_thread"]

Operand = Tensor | ctypes.Structure | ctypes.c_int64 | int | None
"""A tensor, structure or number, the address of which a function is given; an integer, which may be an address; None: 0."""
MOST_OPERANDS, _MESSAGE = 64, 256
"""`MOST` and `MESSAGE` of calls.cpp."""
_thread = threading.local()


class Calls:
    """Calls of functions of C++ with fixed operands, which it keeps alive.

    run: `run_calls` of calls.cpp.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._numbers: list[int] = []
        self._operands: list[Operand] = []
        self._checks: list[Callable[[], None]] = []
        self._assumed: dict[object, tuple[Callable[..., bool], Sequence[Tensor]]] = {}
        self._message = ctypes.create_string_buffer(_MESSAGE)

    def add(self, function: int, operands: Sequence[Operand]) -> None:
        """Write down a call of the function at this address."""
        assert len(operands) <= MOST_OPERANDS, f"a function of {len(operands)} operands cannot be written down"
        self._numbers += [function, len(operands), *((address_of(x) or 0) for x in operands)]
        self._operands += operands

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """In this context, functions that `cpp_function` gives are not called on this thread, but written down here."""
        assert calls_of_thread() is None, "calls are written down already"
        _thread.calls = self
        try:
            yield
        finally:
            _thread.calls = None

    @property
    def assumed(self) -> Sequence[Tensor]:
        """The tensors on whose numbers it depends whether these calls do what was asked for."""
        return [x for _, tensors in self._assumed.values() for x in tensors]

    def __call__(self) -> bool:
        """Make all calls. False if what was assumed does not hold: then none is made. Raises RuntimeError with what the first
        function says that fails."""
        if not all(condition(*tensors) for condition, tensors in self._assumed.values()):
            return False
        start = ctypes.addressof(self._array)
        self._run(start, start + ctypes.sizeof(self._array), ctypes.addressof(self._message))
        if self._message.value:
            said, self._message.value = self._message.value.decode(errors="replace"), b""
            raise RuntimeError(said)
        for check in self._checks:
            check()
        return True

    @functools.cached_property
    def _array(self) -> ctypes.Array:
        """What `run_calls` reads."""
        return (ctypes.c_int64 * len(self._numbers))(*self._numbers)


def calls_of_thread() -> Calls | None:
    """Where the calls of this thread are written down; None if they are made."""
    return getattr(_thread, "calls", None)


def after_calls(check: Callable[[], None]) -> None:
    """Call `check`, which raises an error for what functions of C++ have found wrong: now, or behind each call of those that are
    written down."""
    calls = calls_of_thread()
    if calls is None:
        check()
    else:
        calls._checks.append(check)


def assume(condition: Callable[..., bool], *tensors: Tensor) -> bool:
    """Whether `condition(*tensors)` holds. Calls that are written down are written for the case that it does: it is asked before
    they are made, so the tensors must have their numbers by then."""
    calls = calls_of_thread()
    if calls is None:
        return condition(*tensors)
    calls._assumed[condition, *((x.data_ptr(), x.shape, x.stride()) for x in tensors)] = condition, tensors
    return True


def address_of(x: Operand) -> int | None:
    """Where an operand lies in memory, or what is given in place of an address."""
    if x is None or isinstance(x, int):
        return x
    return x.data_ptr() if isinstance(x, Tensor) else ctypes.addressof(x)
