"""Optimizer: what an optimizer is to training and to the compiler. Hyperparameters inside, state outside.

An optimizer of one's own is a subclass that says five things, or any object with the same seven members:

    @dataclass(frozen=True)
    class Lion(Optimizer):
        lr: float
        slots: ClassVar = ("m",)

        def update_leaf(self, param, grad, slots, lr, step, scale, *, decays): ...
        def decays(self, path, leaf): ...
        def rate(self, step): ...
        def scale(self, norm): ...

`init` and `update` follow from these, for whole trees in one process. A compiled step calls `update_leaf` instead, for the shards
that its rank stores.
"""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.tree import Tree

__all__ = ["OptState", "Optimizer", "check_optimizer"]

T = TypeVar("T")
"""The class of a tree of parameters; gradients and new parameters come in trees of the same class."""


@tree.struct
class OptState:
    """State of an optimizer.

    step:   int64 scalar: the number of updates made so far.
    slots:  slot name -> a tree like the parameters, every leaf shaped like its parameter.
    """

    step: Tensor
    slots: dict[str, Tree]


class Optimizer(Protocol):
    """A pure optimizer. It must pickle: it travels to every rank inside the compiled program."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the tensors that are kept for each parameter, such as `("m", "v")`; `()` for none.

        Read when a step is compiled and when a state is made. Each slot of a parameter has its shape and dtype, is stored where
        the strategy's table for optimizer state says, starts at zero, and is in checkpoints as `opt.<slot>.<path>`.
        """

    @abstractmethod
    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter after one update with `grad * scale`.

        The compiler traces it once for each group of parameters; `update` calls it for every parameter at every step. It must be
        pure, without a branch on values: it sees only meta tensors while it is traced.

        param, slots:  float32 or float64; the results have the same shapes and dtypes, slots in the order of `slots`.
        grad:          shaped like `param`, in the dtype of stored gradients, which may be narrower; neither clipped nor scaled.
        lr, step, scale:  float64 scalars (`step` may be int64): `rate(step)`, the number of this update (the first is 1), and
                       what `scale` made of the global norm.
        decays:        what `decays` said of the parameter.

        Where the tensors are shards of a parameter the sharding pass works out what an update needs of other ranks: nothing, for
        an update that is element-wise.
        """

    @abstractmethod
    def decays(self, path: str, leaf: Tensor | Axes) -> bool:
        """Whether weight decay applies to the parameter at `path`.

        The compiler passes the tuple of the parameter's logical axes as `leaf`, `update` its tensor. The answer must be the same.
        """

    @abstractmethod
    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1. Every rank asks before each step, on the host."""

    @abstractmethod
    def scale(self, norm: Tensor) -> Tensor:
        """What gradients are multiplied with, given their global `norm`: the clip factor, or 1 where nothing is clipped.

        `norm` is a scalar, float32 or float64, over all parameters of all ranks; the result is a floating scalar too. The
        compiler traces it once, so it must be pure, without a branch on values; in Python, whoever calls `update` may call it.
        """

    def init(self, params: Tree) -> OptState:
        """State before the first update: step 0 and zeros like `params`, which are float32 or float64 (else DtypeError).

        Training in Python calls it once; a compiled program makes the same state shard by shard, from `slots` alone.
        """
        _check_masters(type(self).__name__, params)
        return OptState(_step_zero(params), {slot: _zeros_like(params) for slot in self.slots})

    def update(self, grads: T, state: OptState, params: T, *, scale: Tensor | float = 1.0) -> tuple[T, OptState]:
        """`(new_params, new_state)` after one update with `grads * scale`. Nothing that is passed in changes.

        Training in Python calls it at every step. `grads` is a tree like `params`; `scale` is the clip factor. It does not clip
        by itself: its caller computes the norm and the factor (`global_norm`, `scale`). Raises ShapeError if trees do not fit.
        """
        _check_trees(type(self).__name__, params, {"grads": grads, **state.slots})
        step = state.step + 1
        lr = torch.tensor(self.rate(int(step)), dtype=torch.float64, device=step.device)
        factor = torch.as_tensor(scale, dtype=torch.float64, device=step.device)
        columns = [tree.leaves(state.slots[slot]) for slot in self.slots]
        new_params, new_slots = [], []
        for i, ((path, param), grad) in enumerate(zip(tree.leaves_with_path(params), tree.leaves(grads), strict=True)):
            slots = tuple(column[i] for column in columns)
            new_param, slots = self.update_leaf(param, grad, slots, lr, step, factor, decays=self.decays(path, param))
            new_params.append(new_param)
            new_slots.append(slots)
        _, structure = tree.flatten(params)
        trees = {slot: tree.unflatten(structure, [slots[i] for slots in new_slots]) for i, slot in enumerate(self.slots)}
        return tree.unflatten(structure, new_params), OptState(step, dict(trees))


_METHODS = {
    "init": "init(params) -> the state before the first update, zeros",
    "update": "update(grads, state, params, *, scale) -> (new params, new state), for whole trees",
    "update_leaf": "update_leaf(param, grad, slots, lr, step, scale, *, decays) -> (new param, new slots), for one parameter",
    "decays": "decays(path, leaf) -> whether weight decay applies to a parameter",
    "rate": "rate(step) -> the learning rate of an update, counted from 1",
    "scale": "scale(norm) -> what gradients of this global norm are multiplied with",
}
"""Every method of an Optimizer, as it is called."""


def check_optimizer(optimizer: object) -> None:
    """Raise ConfigError, naming every member that is missing or that is not what it must be, unless this is an Optimizer."""
    if isinstance(optimizer, type):
        problems = [f"it is a class; pass an optimizer, such as {optimizer.__name__}(...)"]
    else:
        problems = [*_slot_problems(optimizer), *(line for name in _METHODS for line in _method_problems(optimizer, name))]
    if problems:
        raise ConfigError(
            f"cannot compile a step with the optimizer {optimizer!r}:\n  "
            + "\n  ".join(problems)
            + "\nmpar.optim.Optimizer says what each must be; a subclass of it has init and update already."
        )


_ABSENT = object()


def _slot_problems(optimizer: object) -> list[str]:
    slots = getattr(optimizer, "slots", _ABSENT)
    meaning = 'the names of what is kept for each parameter, such as ("m", "v"), or ()'
    if slots is _ABSENT:
        return [f"it lacks `slots`: {meaning}"]
    if not isinstance(slots, tuple) or not all(isinstance(name, str) and name and "." not in name for name in slots):
        return [f"its `slots` is {slots!r}, which is not a tuple of names without dots: {meaning}"]
    repeated = sorted({name for name in slots if slots.count(name) > 1})
    return [f"its `slots` has {repeated} more than once"] if repeated else []


def _method_problems(optimizer: object, name: str) -> list[str]:
    method = getattr(optimizer, name, _ABSENT)
    if method is _ABSENT:
        return [f"it lacks `{name}`: {_METHODS[name]}"]
    if not callable(method):
        return [f"its `{name}` is {method!r}, which cannot be called: {_METHODS[name]}"]
    try:
        own, asked = inspect.signature(method), inspect.signature(getattr(Optimizer, name))
    except ValueError:  # a function written in C tells no signature
        return []
    arguments = [parameter for parameter in asked.parameters.values() if parameter.name != "self"]
    try:
        own.bind(
            *(None for parameter in arguments if parameter.kind is not parameter.KEYWORD_ONLY),
            **{parameter.name: None for parameter in arguments if parameter.kind is parameter.KEYWORD_ONLY},
        )
    except TypeError as error:
        return [f"its `{name}{own}` cannot be called as it is ({error}): {_METHODS[name]}"]
    return []


def _check_masters(name: str, params: Tree) -> None:
    """Raise DtypeError, listing all of them, if some parameters are not float32 or float64."""
    wrong = [
        f"{path} {tuple(leaf.shape)} is {leaf.dtype}"
        for path, leaf in tree.leaves_with_path(params)
        if leaf.dtype not in (torch.float32, torch.float64)
    ]
    if wrong:
        raise DtypeError(
            f"{name}.init: optimizer state is kept for float32 or float64 masters, but\n  "
            + "\n  ".join(wrong)
            + "\nConvert the parameters to float32; compute in a lower precision is the compiler's to choose."
        )


def _zeros_like(params: T) -> T:
    return tree.map_leaves(lambda leaf: torch.zeros_like(leaf, memory_format=torch.contiguous_format), params)


def _step_zero(params: Tree) -> Tensor:
    """The step counter before the first update, where the parameters are (meta parameters have a meta state)."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _check_trees(name: str, params: Tree, others: Mapping[str, Tree]) -> None:
    """Raise ShapeError, listing all disagreements, unless every one of `others` has the paths and shapes of `params`."""
    expected = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(params)}
    problems = []
    for label, other in others.items():
        actual = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(other)}
        problems += [f"{label} has no {path}" for path in expected if path not in actual]
        problems += [f"{label} has {path}, the parameters do not" for path in actual if path not in expected]
        problems += [
            f"{label} {path} has shape {actual[path]}, the parameter {shape}"
            for path, shape in expected.items()
            if path in actual and actual[path] != shape
        ]
    if problems:
        raise ShapeError(f"{name}.update: trees do not fit the parameters:\n  " + "\n  ".join(problems))
