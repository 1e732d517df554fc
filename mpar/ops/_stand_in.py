"""StandIn: an object that stands for a tensor in a function of tensors, such as a weight that is a sum of two products.

It is no subclass of Tensor: functions of torch and primitives hand their call to its `__torch_function__`, and the object says
which of them it computes in its own way. All others read the tensor that it stands for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mpar.ops.primitive import Primitive
from mpar.torch_private import pytree

__all__ = ["StandIn", "of_rows"]

W = TypeVar("W")


class StandIn(ABC):
    """An operand that stands for a tensor. A subclass says what it is like, and which calls it computes without making it."""

    like: Tensor
    """A tensor without data of the shape, dtype and device that it stands for."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The tensor itself."""

    def primitive(self, primitive: Primitive, operands: tuple, params: Mapping[str, object]) -> object:
        """The result of a primitive; NotImplemented if the tensor is needed for it."""
        return NotImplemented

    def function(self, name: str, args: tuple, kwargs: Mapping[str, object]) -> object:
        """The result of a function or a method of torch by its name, such as "transpose"; NotImplemented likewise."""
        return NotImplemented

    def of_rows(self, rows: Callable[[Tensor], Tensor]) -> "StandIn":
        """The same for products with rows that are not the tokens of a batch: `rows` brings what belongs to tokens (B, S, F) into
        the order of the rows (R, F)."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        bound = getattr(func, "__self__", None)
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, StandIn)]
        for stand_in in found:
            if isinstance(bound, Primitive):
                result = stand_in.primitive(bound, args, kwargs)
            else:
                result = stand_in.function(str(getattr(func, "__name__", "")).strip("_"), args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = pytree.tree_map(_tensor, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.like.dtype

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return self.like.ndim

    def __getattr__(self, name: str) -> Any:
        found = getattr(Tensor, name, None)
        if name.startswith("__") or found is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        if not callable(found):
            return getattr(self.like if name in _OF_LIKE else self.tensor(), name)
        return lambda *args, **kwargs: type(self).__torch_function__(found, (), (self, *args), kwargs)


_OF_LIKE = frozenset({"device", "layout", "is_cuda", "is_meta", "requires_grad", "itemsize", "nbytes"})
_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg", "pow", "getitem", "len"),
    *("lt", "le", "gt", "ge"),
)


def of_rows(weight: W, rows: Callable[[Tensor], Tensor]) -> W:
    """`StandIn.of_rows` of what stands for a weight; a tensor is the same for all rows."""
    return cast(W, weight.of_rows(rows)) if isinstance(weight, StandIn) else weight


def _tensor(x: object) -> object:
    return x.tensor() if isinstance(x, StandIn) else x


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(Tensor, f"__{name}__")

    def _call(self: StandIn, *args: object) -> Any:
        return type(self).__torch_function__(func, (), (self, *args))

    _call.__name__ = f"__{name}__"
    return cast(Callable[..., Any], _call)


for _name in _OPERATORS:
    setattr(StandIn, f"__{_name}__", _operator(_name))
