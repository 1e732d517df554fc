"""Optimizer: what training and the compiler need from an optimizer. It has the hyperparameters; the state is passed in and out.

To write one, subclass `Optimizer` and define five members, or pass any object that has all seven members:

    @dataclass(frozen=True)
    class Lion(Optimizer):
        lr: float
        slots: ClassVar = ("m",)

        def update_leaf(self, param, grad, slots, lr, step, scale, *, decays): ...
        def decays(self, path, leaf): ...
        def rate(self, step): ...
        def scale(self, norm): ...

`init` and `update` follow from these; they work on all parameters in one process. A compiled step calls `update_leaf` instead,
with the shards that its rank stores.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.tree import Tree
from mpar.user_code import user_code

__all__ = [
    "LeafRule",
    "OptState",
    "Optimizer",
    "decays",
    "gradient_factor",
    "leaf_rule",
    "slot_dims",
    "updated",
]

T = TypeVar("T")
"""The class of a tree of parameters; gradients and new parameters come in trees of the same class."""


@tree.struct
class OptState:
    """State of an optimizer.

    step:   int64 scalar: the number of updates made so far.
    slots:  slot name -> a tree like the parameters, every leaf with the dims that the rule of the parameter says, which are those
            of the parameter unless it says others; a parameter whose rule has no such slot has a leaf without elements there.
    """

    step: Tensor
    slots: dict[str, Tree]


class LeafRule(Protocol):
    """How one parameter is updated: the names of its slots, and `update_leaf`. It must be hashable, as frozen dataclasses are."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the parameter: some of those of the optimizer, in their order."""
        ...

    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` after one update, as in Optimizer."""
        ...

    def slot_dims(self, slot: str, ndim: int) -> tuple[int, ...]:
        """The dims of a slot of a parameter with `ndim` dims, as dims of the parameter: `(0, 0)` is a square of its first dim.

        The default is `(0, 1, ..., ndim - 1)`: the shape of the parameter. A slot is stored like the parameter, sharded along the
        same axes; where it has a dim of the parameter twice, the second one is not sharded.
        """
        return tuple(range(ndim))


class Optimizer(Protocol):
    """An optimizer without state of its own. One that travels to ranks inside the file of a program must be a dataclass."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the tensors that are kept for each parameter, such as `("m", "v")`; `()` for none.

        They are read when a step is compiled and when a state is made. Each slot of a parameter has its dtype, and its shape
        unless the rule says other dims (`LeafRule.slot_dims`). It is sharded by the strategy's table for optimizer state, starts
        at zero, and is called `opt.<slot>.<path>` in checkpoints.
        """

    @abstractmethod
    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`(new param, new slots)` of one parameter after one update with `grad * scale`.

        The compiler traces it once for each group of parameters; `update` calls it for every parameter at every step. It must be
        pure and must not branch on values: while it is traced, it sees only meta tensors.

        param, slots:  float32 or float64; the results have the same shapes and dtypes, slots in the order of `slots`.
        grad:          shaped like `param`, in the dtype of stored gradients, which may be narrower; not yet clipped or scaled.
        lr, step, scale:  float64 scalars (`step` may be int64): `rate(step)`; the number of this update, where the first is 1;
                       and the result of `scale` for the global norm.
        decays:        the result of `decays` for the parameter.

        If the tensors are shards of a parameter, lowering adds the communication that the update needs. An element-wise
        update needs none.
        """

    @abstractmethod
    def decays(self, path: str, leaf: Tensor | Axes) -> bool:
        """Whether weight decay applies to the parameter at `path`.

        The compiler passes the tuple of the parameter's logical axes as `leaf`, `update` its tensor. The answer must be the same.
        """

    @abstractmethod
    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1. Every rank calls it on the host before each step."""

    @abstractmethod
    def scale(self, norm: Tensor) -> Tensor:
        """The factor for all gradients, given their global `norm`: the clip factor, or 1 if nothing is clipped.

        `norm` is a scalar, float32 or float64, over all parameters of all ranks; the result is a floating-point scalar too. The
        compiler traces it once, so it must be pure and must not branch on values. In Python, the caller of `update` may call it.
        """

    def leaf_rule(self, path: str, axes: Axes) -> LeafRule:
        """The rule for the parameter at `path` with these logical axes. The default is the optimizer itself, for all parameters.

        An optimizer that treats parameters differently, such as Muon, returns another one for some. The slots of a rule are some
        of `slots`; the other ones are not kept for the parameter.
        """
        return self

    def slot_dims(self, slot: str, ndim: int) -> tuple[int, ...]:
        """The dims of a slot where the optimizer itself is the rule, as in LeafRule: by default those of the parameter."""
        return tuple(range(ndim))

    def init(self, params: Tree, *, axes: Tree | None = None) -> OptState:
        """State before the first update: step 0 and zeros like `params`, which are float32 or float64 (else DtypeError).

        Training in Python calls it once; a compiled program makes the same state shard by shard, from the slots alone.
        axes: the logical axes of each parameter (`Chain.param_axes`), for `leaf_rule`; None: no dim has a name.
        """
        _check_masters(type(self).__name__, params)
        rules = _rules(self, params, axes)
        return OptState(_step_zero(params), {slot: _zeros_like(params, slot, rules) for slot in self.slots})

    def update(
        self, grads: T, state: OptState, params: T, *, scale: Tensor | float = 1.0, axes: Tree | None = None
    ) -> tuple[T, OptState]:
        """`(new_params, new_state)` after one update with `grads * scale`. It changes none of its arguments.

        Training in Python calls it at every step. `grads` is a tree like `params`; `scale` is the clip factor. `update` does not
        clip by itself: its caller computes the norm and the factor (`global_norm`, `scale`). `axes` are those that `init` was
        given. Raises ShapeError if the trees do not fit each other.
        """
        rules = _rules(self, params, axes)
        _check_trees(type(self).__name__, params, {"grads": grads, **state.slots}, rules)
        step = state.step + 1
        lr = torch.tensor(self.rate(int(step)), dtype=torch.float64, device=step.device)
        factor = torch.as_tensor(scale, dtype=torch.float64, device=step.device)
        columns = {slot: tree.leaves(state.slots[slot]) for slot in self.slots}
        new_params = []
        for i, ((path, param), grad) in enumerate(zip(tree.leaves_with_path(params), tree.leaves(grads), strict=True)):
            rule = rules[path]
            slots = tuple(columns[slot][i] for slot in rule.slots)
            old, kept = (param, *slots), decays(self, path, param)
            new_param, new_slots = updated(self, rule, path, old, grad, lr, step, factor, decays=kept)
            new_params.append(new_param)
            for slot, new in zip(rule.slots, new_slots, strict=True):
                columns[slot][i] = new
        _, structure = tree.flatten(params)
        trees = {slot: tree.unflatten(structure, column) for slot, column in columns.items()}
        return tree.unflatten(structure, new_params), OptState(step, dict(trees))


def leaf_rule(optimizer: Optimizer, path: str, axes: Axes) -> LeafRule:
    """The rule of `optimizer` for one parameter; an object that does not say `leaf_rule` has one rule for all, itself.

    Raises ConfigError if it is no rule, or has slots that the optimizer does not have, or in another order.
    """
    if not hasattr(optimizer, "leaf_rule"):
        return optimizer
    with user_code(f"leaf_rule of {type(optimizer).__name__}, for parameter {path!r},"):
        rule = optimizer.leaf_rule(path, axes)
    if not callable(getattr(rule, "update_leaf", None)) or not isinstance(getattr(rule, "slots", None), tuple):
        raise ConfigError(
            f"leaf_rule of {type(optimizer).__name__}, for parameter {path!r}, returned {rule!r}, which is no rule.\n"
            "Return an object with `slots`, a tuple of names, and `update_leaf`: the optimizer itself, or one for this parameter."
        )
    if list(rule.slots) != [slot for slot in optimizer.slots if slot in rule.slots]:
        raise ConfigError(
            f"the rule of {optimizer!r} for parameter {path!r} has the slots {rule.slots}; the optimizer has {optimizer.slots}.\n"
            "The slots of a rule are some of the optimizer's, in the same order: add them to `slots` of the optimizer."
        )
    return rule


def slot_dims(rule: LeafRule, slot: str, ndim: int) -> tuple[int, ...]:
    """The dims of a slot of a parameter with `ndim` dims, as dims of the parameter; without `slot_dims` those of the parameter.

    Raises ConfigError if the rule names a dim that the parameter does not have.
    """
    if not hasattr(rule, "slot_dims"):
        return tuple(range(ndim))
    dims = rule.slot_dims(slot, ndim)
    if not isinstance(dims, tuple) or not all(isinstance(dim, int) and 0 <= dim < ndim for dim in dims):
        raise ConfigError(
            f"slot_dims of {rule!r} for slot {slot!r} is {dims!r}, which are not dims of a parameter with {ndim}.\n"
            "Return a tuple of dims of the parameter, counted from 0, such as (0, 0) for a square of its first dim."
        )
    return dims


def decays(optimizer: Optimizer, path: str, leaf: Tensor | Axes) -> bool:
    """Whether weight decay applies to the parameter at `path`. Raises ConfigError if the optimizer does not say so."""
    with user_code(f"decays of {type(optimizer).__name__}, for parameter {path!r},"):
        answer = optimizer.decays(path, leaf)
    if not isinstance(answer, bool):
        raise ConfigError(
            f"decays of {type(optimizer).__name__}, for parameter {path!r}, returned {answer!r}: return True or False.\n"
            "`leaf` is the tuple of the names of the parameter's dims where a step is compiled, and its tensor in `update`."
        )
    return answer


def gradient_factor(optimizer: Optimizer, norm: Tensor) -> Tensor:
    """The factor for all gradients, given their global norm, as a scalar. Raises ConfigError if the optimizer gives another."""
    call = f"scale of {type(optimizer).__name__}"
    with user_code(call):
        factor = optimizer.scale(norm)
    if not isinstance(factor, Tensor) or factor.ndim or not factor.is_floating_point():
        shown = factor if isinstance(factor, (int, float)) else _look(factor)
        raise ConfigError(
            f"{call} returned {shown}: it must be a floating-point tensor without dims.\n"
            "Compute it from `norm`: torch.ones_like(norm) where nothing is clipped."
        )
    return factor


def updated(
    optimizer: Optimizer, rule: LeafRule, path: str, old: tuple[Tensor, ...], grad: Tensor, *scalars: Tensor, decays: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`(new param, new slots)` of `rule.update_leaf`.

    old: the parameter at `path` and its slots. scalars: lr, step, scale.
    Raises ConfigError unless they are shaped like the old ones, TraceError for what the rule raises.
    """
    call = f"update_leaf of {type(optimizer).__name__}, for parameter {path!r} {tuple(old[0].shape)}"
    lr, step, scale = scalars
    with user_code(f"{call},"):
        result = rule.update_leaf(old[0], grad, old[1:], lr, step, scale, decays=decays)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{call}: it returned {_look(result)}, not a pair.\n"
            "Return `(new param, new slots)`, with a tuple of one new tensor for each slot, in the order of `slots`."
        )
    _check_result(call, old, *result)
    return result[0], tuple(result[1])


def _check_result(call: str, old: tuple[Tensor, ...], new_param: object, new_slots: object) -> None:
    """Raise ConfigError unless the new parameter and slots are shaped like those in `old`."""
    if not isinstance(new_param, Tensor) or not isinstance(new_slots, (tuple, list)) or len(new_slots) != len(old) - 1:
        number = len(new_slots) if isinstance(new_slots, (tuple, list)) else type(new_slots).__name__
        raise ConfigError(
            f"{call}: it returned a {type(new_param).__name__} and {number} slots; the parameter has {len(old) - 1}.\n"
            "Return `(new param, new slots)`, with a tuple of one new tensor for each slot, in the order of `slots`."
        )
    names = ["new param", *(f"new slot {i}" for i in range(len(new_slots)))]
    problems = [
        f"{name} is {_look(new)}, and was {_look(before)}"
        for name, before, new in zip(names, old, (new_param, *new_slots), strict=True)
        if not isinstance(new, Tensor) or new.shape != before.shape or new.dtype != before.dtype
    ]
    if problems:
        raise ConfigError(
            f"{call}:\n  "
            + "\n  ".join(problems)
            + "\nResults have the shapes and dtypes of the parameter and its slots: "
            "convert the gradient with grad.to(param.dtype), and do not change shapes."
        )


def _look(x: object) -> str:
    if x is None:
        return "nothing"
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _check_masters(name: str, params: Tree) -> None:
    """Raise DtypeError, listing all of them, if some parameters are not float32 or float64."""
    wrong = [
        f"{path} {tuple(leaf.shape)} is {leaf.dtype}"
        for path, leaf in tree.leaves_with_path(params)
        if leaf.dtype not in (torch.float32, torch.float64)
    ]
    if wrong:
        raise DtypeError(
            f"{name}.init: optimizer state is kept for float32 or float64 parameters, but\n  "
            + "\n  ".join(wrong)
            + "\nConvert the parameters to float32. To compute in a lower one, pass `precision` to compile_step."
        )


def _rules(optimizer: Optimizer, params: Tree, axes: Tree | None) -> dict[str, LeafRule]:
    """The rule for each parameter, by path."""
    named = tree.leaves_with_path(params)
    dims = [(None,) * leaf.ndim if axes is None else tuple(tree.get(axes, path)) for path, leaf in named]
    return {path: leaf_rule(optimizer, path, leaf_axes) for (path, _), leaf_axes in zip(named, dims, strict=True)}


def _zeros_like(params: T, slot: str, rules: Mapping[str, LeafRule]) -> T:
    """Zeros for every parameter whose rule has this slot; no elements for the others."""
    leaves = [
        leaf.new_zeros(_slot_shape(leaf, slot, rules[path])) if slot in rules[path].slots else leaf.new_zeros(0)
        for path, leaf in tree.leaves_with_path(params)
    ]
    return tree.unflatten(tree.flatten(params)[1], leaves)


def _slot_shape(param: Tensor, slot: str, rule: LeafRule) -> tuple[int, ...]:
    return tuple(param.shape[dim] for dim in slot_dims(rule, slot, param.ndim))


def _step_zero(params: Tree) -> Tensor:
    """The step counter before the first update, where the parameters are (meta parameters have a meta state)."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _check_trees(name: str, params: Tree, others: Mapping[str, Tree], rules: Mapping[str, LeafRule]) -> None:
    """Raise ShapeError, listing all disagreements, unless every one of `others` has the paths of `params`, `grads` their shapes,
    and slots the shapes that the rules say. Where the rule of a parameter does not have a slot, its leaf may have any shape."""
    leaves = dict(tree.leaves_with_path(params))
    expected = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    problems = []
    for label, other in others.items():
        actual = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(other)}
        problems += [f"{label} has no {path}" for path in expected if path not in actual]
        problems += [f"{label} has {path}, the parameters do not" for path in actual if path not in expected]
        problems += [
            f"{label} {path} has shape {actual[path]}, the parameter {shape}"
            for path, shape in expected.items()
            if path in actual and label == "grads" and actual[path] != shape
        ]
        problems += [
            f"{label} {path} has shape {actual[path]}, its rule says {shape}"
            for path, leaf in leaves.items()
            if path in actual and label in rules[path].slots and actual[path] != (shape := _slot_shape(leaf, label, rules[path]))
        ]
    if problems:
        raise ShapeError(f"{name}.update: trees do not fit the parameters:\n  " + "\n  ".join(problems))
