"""Functions of `torch.autograd` as they were written before `setup_context` was there: `forward(ctx, ...)` computes and saves.

Transforms of `torch.func` refuse them. Each call is made by a function with `setup_context`, which gives the saved tensors out as
further results, as torch's notes on extending torch.func ask for.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mpar.errors import TraceError
from mpar.torch_private import functorch_transforms_active

__all__ = ["early_functions_called"]


@contextlib.contextmanager
def early_functions_called() -> Iterator[None]:
    """In this context such functions can be differentiated and mapped like others."""
    function: Any = torch.autograd.Function
    saved = function.__dict__["apply"]
    function.apply = classmethod(lambda cls, *args, **kwargs: _apply(cls, saved.__get__(None, cls), args, kwargs))
    try:
        yield
    finally:
        function.apply = saved


def _apply(cls: Any, apply: Any, args: tuple, kwargs: dict) -> object:
    if cls.setup_context is not torch.autograd.Function.setup_context or not functorch_transforms_active():
        return apply(*args, **kwargs)
    if kwargs:
        raise TypeError(f"{cls.__name__}.apply() takes no keyword arguments")
    call = _Call(cls)
    made = call.function().apply(*args)
    return made[0] if call.single else made[: call.num_results]


class _Context:
    """What `forward` and `backward` of such a function get as `ctx`. Tensors that `forward` keeps are the same for both."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.__dict__["needs_input_grad"] = needs_input_grad
        self.__dict__["saved_tensors"] = ()
        self.__dict__["constants"] = ()
        self.__dict__["materialize"] = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which `backward` finds in `saved_tensors`."""
        self.__dict__["saved_tensors"] = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Note results that have no gradient."""
        self.__dict__["constants"] = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Whether the missing gradient of a result is zeros; otherwise it is None."""
        self.__dict__["materialize"] = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Refused: the function writes into its operands."""
        raise TraceError(
            f"cannot trace a function of autograd that marks {len(tensors)} operands dirty: it writes into them.\n"
            "Return a new tensor instead."
        )


class _Late(FunctionCtx):
    """What torch gives the `backward` of a function with `setup_context`."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]


class _Call:
    """One call of such a function. `single`: it returns one tensor, and not a tuple."""

    def __init__(self, cls: Any) -> None:
        self.cls, self.single, self.num_results = cls, False, 0
        self.attributes: dict[str, object] = {}  # what `forward` keeps and is no tensor
        self.places: dict[str, list[tuple[str, int] | None]] = {}  # kept tensors: of inputs or outputs, and which
        self.constants: list[int] = []
        self.materialize = True

    def forward(self, args: Sequence[object]) -> tuple:
        """The results, and behind them the tensors that `forward` keeps and that are neither operands nor results."""
        ctx = _Context(tuple(isinstance(x, Tensor) and x.is_floating_point() for x in args))
        results = self.cls.forward(ctx, *args)
        self.single = not isinstance(results, tuple)
        outputs = [results] if self.single else list(results)
        self.num_results = len(outputs)
        kept = {"saved_tensors": list(ctx.__dict__["saved_tensors"])}
        for name, value in ctx.__dict__.items():
            if name not in ("saved_tensors", "constants", "materialize", "needs_input_grad"):
                if isinstance(value, Tensor):
                    kept[name] = [value]
                else:
                    self.attributes[name] = value
        self.places = {name: [self._place(value, args, outputs) for value in values] for name, values in kept.items()}
        constants = ctx.__dict__["constants"]
        self.constants = [i for i, x in enumerate(outputs[: self.num_results]) if any(x is constant for constant in constants)]
        self.constants += range(self.num_results, len(outputs))
        self.materialize = ctx.__dict__["materialize"]
        return tuple(outputs)

    def _place(self, value: object, args: Sequence[object], outputs: list) -> tuple[str, int] | None:
        if value is None:
            return None
        for where, tensors in (("inputs", args), ("outputs", outputs)):
            index = next((i for i, other in enumerate(tensors) if other is value), None)
            if index is not None:
                return where, index
        outputs.append(value)
        return "outputs", len(outputs) - 1

    def function(self) -> type[torch.autograd.Function]:
        """The function with `setup_context` that makes this call."""
        call = self

        class Late(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*args: object) -> tuple:
                return call.forward(args)

            @staticmethod
            def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
                found = {"inputs": inputs, "outputs": output}
                flat: list[Any] = [
                    None if place is None else found[place[0]][place[1]] for of in call.places.values() for place in of
                ]
                ctx.save_for_backward(*flat)
                ctx.mark_non_differentiable(*(output[i] for i in call.constants))
                ctx.set_materialize_grads(call.materialize)

            @staticmethod
            def backward(ctx: _Late, *cotangents: Tensor | None) -> object:
                early = _Context(ctx.needs_input_grad)
                early.__dict__.update(call.attributes)
                remaining = iter(ctx.saved_tensors)
                for name, places in call.places.items():
                    values = tuple(next(remaining) for _ in places)
                    early.__dict__[name] = values if name == "saved_tensors" else values[0]
                return call.cls.backward(early, *cotangents[: call.num_results])

        return Late
