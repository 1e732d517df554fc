"""What every optimizer needs of whole trees: state, the global norm, the clip factor, which parameters decay, checks."""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops import sum_squares
from mpar.optim._schedule import Schedule, learning_rate

__all__ = ["OptState", "Optimizer", "WeightDecayMask", "clip_factor", "global_norm"]

WeightDecayMask = Literal["by_rank", "all"]
"""Which parameters decay. "by_rank": those of two or more dims that are not biases; "all": every one.

A bias may have two dims here (`q_bias_NH`, one number for each head and element), so the name counts as well as the rank.
"""


@tree.struct
class OptState:
    """State of an optimizer.

    step:   int64 scalar: the number of updates made so far.
    slots:  slot name -> a tree like the parameters, every leaf shaped like its parameter.
    """

    step: Tensor
    slots: dict[str, Any]


class Optimizer(Protocol):
    """What training and the compiler ask of an optimizer; AdamW and SGD say what each means."""

    @property
    def lr(self) -> Schedule | float: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def slots(self) -> tuple[str, ...]: ...
    def init(self, params: Any) -> OptState: ...
    def update(self, grads: Any, state: OptState, params: Any, *, scale: Tensor | float = 1.0) -> tuple[Any, OptState]: ...
    def update_leaf(
        self, param: Tensor, grad: Tensor, slots: tuple[Tensor, ...], lr: Tensor, step: Tensor, scale: Tensor, *, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...
    def decays(self, path: str, leaf: Any) -> bool: ...


def global_norm(grads: Any) -> Tensor:
    """The Euclidean norm of all leaves of `grads` together: a scalar, float32 or wider.

    Square sums are added in the order of the leaves, starting from the first, as a compiled program does.
    Raises ShapeError if there is no leaf.
    """
    squares = [sum_squares(grad) for grad in tree.leaves(grads)]
    if not squares:
        raise ShapeError("global_norm: the tree of gradients has no leaf, so it has no norm")
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """`min(1, max_norm / (norm + 1e-6))`, what gradients of global `norm` are multiplied with so that it is at most `max_norm`.

    The same formula as torch.nn.utils.clip_grad_norm_. A norm that is not finite gives 0 or NaN: check it first.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def zeros_like_params(name: str, params: Any) -> Any:
    """A slot of zeros for each parameter. Raises DtypeError, listing all of them, if some are not float32 or float64."""
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
    return tree.map_leaves(lambda leaf: torch.zeros_like(leaf, memory_format=torch.contiguous_format), params)


def step_zero(params: Any) -> Tensor:
    """The step counter before the first update, where the parameters are (meta parameters have a meta state)."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def update_leaves(optimizer: Optimizer, grads: Any, state: OptState, params: Any, scale: Tensor | float) -> tuple[Any, OptState]:
    """`optimizer.update`: `update_leaf` for every parameter, at the rate of the next step."""
    _check_trees(type(optimizer).__name__, params, {"grads": grads, **state.slots})
    step = state.step + 1
    lr = torch.tensor(learning_rate(optimizer.lr, int(step)), dtype=torch.float64, device=step.device)
    scale = torch.as_tensor(scale, dtype=torch.float64, device=step.device)
    _, structure = tree.flatten(params)
    columns = [tree.leaves(state.slots[slot]) for slot in optimizer.slots]
    new_params, new_slots = [], []
    for i, ((path, param), grad) in enumerate(zip(tree.leaves_with_path(params), tree.leaves(grads), strict=True)):
        slots = tuple(column[i] for column in columns)
        new_param, slots = optimizer.update_leaf(param, grad, slots, lr, step, scale, decays=optimizer.decays(path, param))
        new_params.append(new_param)
        new_slots.append(slots)
    trees = {slot: tree.unflatten(structure, [slots[i] for slots in new_slots]) for i, slot in enumerate(optimizer.slots)}
    return tree.unflatten(structure, new_params), OptState(step, trees)


def _check_trees(name: str, params: Any, others: dict[str, Any]) -> None:
    """Raise ShapeError, listing all disagreements, unless every one of `others` has the paths and shapes of `params`."""
    expected = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(params)}
    problems = []
    for what, other in others.items():
        actual = {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(other)}
        problems += [f"{what} has no {path}" for path in expected if path not in actual]
        problems += [f"{what} has {path}, the parameters do not" for path in actual if path not in expected]
        problems += [
            f"{what} {path} has shape {actual[path]}, the parameter {shape}"
            for path, shape in expected.items()
            if path in actual and actual[path] != shape
        ]
    if problems:
        raise ShapeError(f"{name}.update: trees do not fit the parameters:\n  " + "\n  ".join(problems))


def decays(mask: WeightDecayMask, path: str, leaf: Any) -> bool:
    """Whether the parameter at `path` decays; `leaf` is its tensor (a meta one will do) or the tuple of its logical axes."""
    if mask == "all":
        return True
    rank = len(leaf.shape) if isinstance(leaf, Tensor) else len(leaf)
    return rank >= 2 and "bias" not in path.rpartition(".")[2]


def mask_problems(mask: object) -> list[str]:
    """A line if `mask` is not a known WeightDecayMask."""
    return [] if mask in ("by_rank", "all") else [f"decay must be 'by_rank' or 'all', not {mask!r}"]


def raise_problems(optimizer: object, problems: list[str]) -> None:
    """Raise ConfigError with one line for each problem, if there is any."""
    if problems:
        raise ConfigError(f"cannot make the optimizer {optimizer!r}:\n  " + "\n  ".join(problems))
