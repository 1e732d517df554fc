"""State: the tensors that a rank holds between steps."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ShapeError
from mpar.ir import ProgramData
from mpar.shards import shard
from mpar.spec import local_shape
from mpar.tree import Tree

__all__ = ["NO_LIMITS", "Expected", "Limits", "State", "check_given", "init_state"]

T = TypeVar("T")
"""The class of a tree of parameters."""
Expected = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor that a program was compiled for."""


@dataclass(frozen=True)
class Limits:
    """The largest loss and the largest gradient norm with which a step makes its update; both are finite.

    With a larger one, and with one that is not finite, the update is skipped: parameters and slots keep their bits.
    """

    loss: float = sys.float_info.max
    grad_norm: float = sys.float_info.max


NO_LIMITS = Limits()
"""Only what is not finite skips an update."""


class State:
    """What a rank holds between steps: its shards of parameters and optimizer slots, the number of steps made, and in how many
    of these the update was skipped, as a number or a 0-d tensor on the device of the leaves.

    A step takes the tensors out of the state that it is given: after `run(state, batch)`, `state` is empty.
    """

    def __init__(self, leaves: dict[str, Tensor], step: int = 0, skipped: int | Tensor = 0) -> None:
        self.leaves, self.step, self.skipped = leaves, step, skipped

    def check(self, expected: Mapping[str, Expected]) -> None:
        """Raise ShapeError, listing all problems, unless the state has the expected leaves."""
        if expected and not self.leaves:  # a rank whose stages have no parameters never has leaves
            raise ShapeError(
                "this state was given to a step already, which took its tensors: use the state that the step returned"
            )
        check_given("this state", expected, self.leaves)

    def take(self) -> dict[str, Tensor]:
        """Take all leaves out of the state."""
        leaves, self.leaves = self.leaves, {}
        return leaves

    def params(self, like: T) -> T:
        """The parameters as a tree with the structure of `like` (`model.abstract_params`)."""
        return tree.unflatten(tree.flatten(like)[1], [self.leaves[f"params.{path}"] for path in tree.paths(like)])

    def __repr__(self) -> str:
        return f"State({len(self.leaves)} tensors, step={self.step})"


def init_state(program: ProgramData, params: Tree, rank: int | None = None) -> State:
    """The state before the first step: `params` and zeros for the optimizer.

    rank: the rank whose shards are returned; None gives a global state, for `simulate`. The leaves of `params` are global
    tensors, or DTensors placed as the program stores them. Frozen ones may have a wider dtype than that in which the program
    stores them. Raises ShapeError, listing all problems, if a parameter is missing, unknown, or of another shape or dtype.
    """
    stored = program.state_in if rank is None else program.part(rank).state_in
    given: dict[str, Any] = {f"params.{path}": x for path, x in tree.leaves_with_path(params)}
    expected = {leaf.path: leaf for leaf in program.state_in if leaf.path.startswith("params.")}
    problems = [f"{path} is missing" for path in expected if path not in given]
    problems += [f"{path} is not in the program" for path in given if path not in expected]
    for path in given.keys() & expected.keys():
        x, leaf = given[path], expected[path]
        if path.removeprefix("params.") in program.facts.frozen and x.is_floating_point():
            x = given[path] = x.to(leaf.dtype)
        if (tuple(x.shape), x.dtype) != (leaf.shape, leaf.dtype):
            problems.append(f"{path} is {x.dtype} {tuple(x.shape)}, the program has {leaf.dtype} {leaf.shape}")
    if problems:
        raise ShapeError("these parameters do not fit the program:\n  " + "\n  ".join(sorted(problems)))
    leaves = {}
    for leaf in stored:
        if leaf.path not in given:
            local = leaf.shape if rank is None else local_shape(leaf.shape, leaf.spec, program.mesh)
            leaves[leaf.path] = torch.zeros(local, dtype=leaf.dtype)
        elif hasattr(given[leaf.path], "to_local"):
            leaves[leaf.path] = given[leaf.path].to_local().clone()
        else:
            leaves[leaf.path] = given[leaf.path] if rank is None else shard(given[leaf.path], leaf.spec, program.mesh, rank)
    return State(leaves)


def check_given(label: str, expected: Mapping[str, Expected], given: Mapping[str, Tensor]) -> None:
    """Raise ShapeError, listing all problems, unless `given` has the expected keys, dtypes and shapes. `label` names it."""
    problems = [f"{key!r} is missing" for key in expected if key not in given]
    problems += [f"{key!r} is not read by the program" for key in given if key not in expected]
    for key, (dtype, shape) in expected.items():
        x = given.get(key)
        if x is not None and (x.dtype != dtype or x.shape != shape):
            problems.append(f"{key!r} is {x.dtype} {tuple(x.shape)}, the program was compiled for {dtype} {shape}")
    if problems:
        raise ShapeError(f"{label} does not fit the program:\n  " + "\n  ".join(problems))
