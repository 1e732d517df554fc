"""Watch: while a function is traced, find the user's source line behind every op, and note what a pure function must not do."""

import bisect
import functools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from mpar.torch_private import (
    TorchDispatchMode,
    TorchFunctionMode,
    current_autograd_node,
    get_current_meta,
    last_autograd_node,
)

__all__ = ["Calls", "Watch", "functional_form"]

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

COMPILER = frozenset({"compiler", "ir", "ops", "program", "runtime", "sharding"})
"""Packages of mpar whose lines are never reported: what they do, they do for the line of a model or a user that called them."""
WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"})


class Watch(TorchDispatchMode):
    """Notes, for each op, the line of the user's or a model's code that caused it; of a gradient, that of its forward op.

    `offenders` lists what makes the function impure; `line` is the line of the op that ran last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offenders: list[str] = []
        self.line = ""
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
        return func(*args, **(kwargs or {}))

    def _forward_line(self, backward: int) -> str:
        """The line of the forward op for which the autograd node `backward` was made: first comes the node, then the op runs."""
        index = bisect.bisect_left(self._nodes, backward)
        return self._lines[index] if index < len(self._lines) else ""


class Calls(TorchFunctionMode):
    """Refuses calls of the user that write into a tensor. Torch's own functions may write into tensors that they have made."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if name in WRITERS or in_place or kwargs.get("inplace"):
            self.watch.refuse(
                name, "writes into a tensor: use the op without the trailing underscore, or torch.where for parts of a tensor"
            )
        elif kwargs.get("out") is not None:
            self.watch.refuse(name, "writes into a tensor: use what it returns instead of out=")
        return func(*args, **kwargs)


def functional_form(func: Any) -> Any:
    """The op that returns what the in-place `func` writes: `aten.add.Tensor` for `aten.add_.Tensor`; None if there is none.

    It is the overload that takes the same types, because names may differ: `aten.pow_.Scalar` writes `aten.pow.Tensor_Scalar`.
    """
    packet = getattr(getattr(torch.ops, func.namespace), func._schema.name.split("::")[1].removesuffix("_"), None)
    forms = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    takes = [str(argument.type) for argument in func._schema.arguments]
    fitting = [form for form in forms if [str(argument.type) for argument in form._schema.arguments] == takes]
    same_name = [form for form in fitting if form._overloadname == func._overloadname]
    return next(iter([*same_name, *fitting]), None)


def _problem(func: Any, args: tuple, kwargs: dict) -> str:
    if torch.Tag.nondeterministic_seeded in func.tags and _argument(func, "dropout_p", args, kwargs) != 0.0:
        name = func._schema.name.split("::")[1]
        instead = next((text for key, text in INSTEAD.items() if key in name), "mpar.ops.random_uniform or random_normal")
        return f"draws from torch's generator: use {instead}, with a key"
    if func is torch.ops.aten.as_strided.default:
        return "reads memory by strides, which differ when sharded: use views, slices or torch.gather"
    return ""


def _argument(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """The value of an argument, its default if it is not given; None if `func` does not have it."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[index] if index < len(args) else argument.default_value)
    return None


def _user_line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code):
            path = Path(frame.f_code.co_filename)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _is_users(code: CodeType) -> bool:
    path = Path(code.co_filename)
    is_compiler = _HERE in path.parents and path.relative_to(_HERE).parts[0] in COMPILER
    return not is_compiler and not code.co_filename.startswith((_TORCH, "<"))
