"""Watch: while a function is traced, find the user's source line behind every op, and note what a pure function must not do."""

import bisect
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import TraceError
from mpar.sharding._control_op import replayed_line
from mpar.sharding._replaced import REPLACED
from mpar.torch_private import (
    TorchDispatchMode,
    TorchFunctionMode,
    current_autograd_node,
    data_checks,
    get_current_meta,
    is_functional,
    last_autograd_node,
    was_written,
)

__all__ = ["Calls", "Watch", "line_of"]

_HERE = Path(__file__).resolve().parent.parent
_TORCH = str(Path(torch.__file__).resolve().parent)

INSTEAD = {
    "bernoulli": "mpar.ops.random_uniform(key, shape) < p",
    "dropout": "mpar.ops.dropout(x, rate, key)",
    "normal": "mpar.ops.random_normal(key, shape)",
    "randn": "mpar.ops.random_normal(key, shape)",
    "rand": "mpar.ops.random_uniform(key, shape)",
    "uniform": "mpar.ops.random_uniform(key, shape)",
}

COMPILER = frozenset({"compiler", "ir", "ops", "program", "runtime", "sharding", "torch_private.py"})
"""Parts of mpar whose lines are never reported: what they do, they do for the line of a model or a user that called them."""
STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default})


QUANTISED = frozenset({torch.qint8, torch.qint32, torch.quint8})


class Watch(TorchDispatchMode):
    """Notes, for each op, the line of the user's or a model's code that caused it; of a gradient, that of its forward op.

    `offenders` lists what makes the function impure; `line` is the line of the op that ran last, `failed` the call that raised an
    error, with its line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offenders: list[str] = []
        self.line = ""
        self.failed: tuple[str, str] | None = None
        self._nodes: list[int] = []  # numbers of autograd nodes, ascending: the newest one at the time of an op
        self._lines: list[str] = []  # the line of that op

    def refuse(self, offender: object, problem: str) -> None:
        """Note that `what`, on the user's line that runs now, makes the function impure."""
        line = _user_line()
        self.offenders.append(f"{offender} at {line} {problem}" if line else f"{offender} {problem}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        backward = current_autograd_node()
        self.line = _user_line() if backward is None else self._forward_line(backward) or _user_line()
        last = last_autograd_node()
        if not self._nodes or self._nodes[-1] < last:
            self._nodes.append(last)
            self._lines.append(self.line)
        get_current_meta()["stack_trace"] = self.line
        problem = _problem(func, args, kwargs or {})
        if problem:
            self.refuse(func, problem)
        if func in data_checks:
            return None
        if _writes_outside(func, args, kwargs or {}):
            raise TraceError(self.offenders[-1])  # if it ran, it would write into a tensor of the user
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self.failed or (str(func), self.line)
            raise
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in tree.leaves(out)):
            self.refuse(func, "makes a sparse tensor: use a dense one, and masks")
        return out

    def _forward_line(self, backward: int) -> str:
        """The line of the forward op for which the autograd node `backward` was made: first comes the node, then the op runs."""
        index = bisect.bisect_left(self._nodes, backward)
        return self._lines[index] if index < len(self._lines) else ""


class Calls(TorchFunctionMode):
    """Refuses calls that write into an argument of the traced function, each argument once."""

    def __init__(self, watch: Watch, names: Sequence[str], arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.watch = watch
        self.unwritten = dict(zip(names, arguments, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        func = REPLACED.get(func, func)
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            self.watch.failed = self.watch.failed or (name, _user_line())
            raise
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            self.watch.refuse("the assignment to .data", "writes into a tensor: give the new value a name of its own")
        if any(isinstance(value, Tensor) and was_written(value) for value in tree.leaves((args, kwargs))):
            self.refuse_written(name)
        return out

    def refuse_written(self, offender: str) -> None:
        """Refuse `offender` for all arguments that have been written into."""
        for name in [name for name, argument in self.unwritten.items() if was_written(argument)]:
            del self.unwritten[name]
            self.watch.refuse(
                offender, f"writes into argument {name}: write into a copy (`.clone()`), and return it if the caller needs it"
            )


def _problem(func: Any, args: tuple, kwargs: dict) -> str:
    if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, "dropout_p", args, kwargs) != 0.0:
        name = func._schema.name.split("::")[1]
        instead = next((text for key, text in INSTEAD.items() if key in name), "mpar.ops.random_uniform or random_normal")
        return f"draws from torch's generator: use {instead}, with a key"
    if _writes_outside(func, args, kwargs):
        return "writes into a tensor from outside the function: make it an argument, write into a copy of it and return the copy"
    if any(isinstance(value, torch.dtype) and value in QUANTISED for value in tree.leaves((args, kwargs))):
        return "makes a quantised tensor: use a tensor of integers, and their scale beside it"
    if func in STRIDED:
        return "reads memory by strides, which differ when sharded: use views, slices or torch.gather"
    return ""


def _writes_outside(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an op writes into a tensor that was made outside of the traced function and is no argument of it."""
    if not func._schema.is_mutable:
        return False
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    targets = tree.leaves([_argument(func, name, args, kwargs) for name in written])
    return any(isinstance(target, Tensor) and not is_functional(target) for target in targets)


def _argument(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """The value of an argument, its default if it is not given; None if `func` does not have it."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[index] if index < len(args) else argument.default_value)
    return None


def _user_line() -> str:
    if replayed_line.get():
        return replayed_line.get()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        line = line_of(frame)
        if line:
            return line
        frame = frame.f_back
    return ""


def line_of(frame: FrameType) -> str:
    """`file:line` of a frame of the user's or a model's code; empty for code of torch and of the compiler."""
    if not _is_users(frame.f_code):
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@functools.cache
def _is_users(code: CodeType) -> bool:
    path = Path(code.co_filename)
    is_compiler = _HERE in path.parents and path.relative_to(_HERE).parts[0] in COMPILER
    return not is_compiler and not code.co_filename.startswith((_TORCH, "<"))
