"""Compile a function for a mesh, simulate it, compare it with torch, and count what its ranks exchange."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.functions._case import MESHES, Function
from bench.functions._wire import sent_bytes
from mpar import P, jit, testing, tree, value_and_grad
from mpar.errors import MparError
from mpar.sharding import Collective, ReplicatedFallback
from mpar.tree import Tree

__all__ = ["PARTS", "Outcome", "Part", "parts_of", "run"]

PARTS = ("forward", "gradient")
GATHERING = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Part:
    """What is compiled: a function itself, or its value and gradient. `reference` computes the same by plain torch."""

    name: str
    fn: Callable[..., Tree]
    reference: Callable[..., Tree]
    args: tuple[Tree, ...]
    in_specs: tuple[Tree, ...]
    out_specs: Tree


@dataclass(frozen=True)
class Outcome:
    """What became of a part of a function on a mesh.

    verdict:     exact, wrong, refused (an error of mpar), or crash (any other error).
    message:     of the error, or how the results differ.
    collectives: every collective as "kind over axes", and how many there are.
    sent:        how many bytes each rank sends.
    needless:    how many values are gathered beyond those that have to be.
    """

    function: str
    mesh: str
    part: str
    verdict: str
    message: str = ""
    collectives: tuple[tuple[str, int], ...] = ()
    sent: int = 0
    needless: int = 0


def parts_of(function: Function, mesh: str) -> list[Part]:
    """A function and, if it has one, its gradient.

    The gradient is that of the sum of the sines of all results: a plain sum would have none for a softmax, and a sum of squares
    none for a norm. Gradients lie where their arguments do; of a result the compiler chooses the place.
    """
    args, specs = function.draw(), [arg.spec(mesh) for arg in function.args]
    parts = [Part("forward", function.fn, function.fn, tuple(args), tuple(specs), None)]
    varies = [arg.varies for arg in function.args]
    if not any(varies):
        return parts

    def scalar(varying: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        sources = {True: iter(varying), False: iter(others)}
        result = function.fn(*(next(sources[each]) for each in varies))
        return torch.stack([x.double().sin().sum() for x in tree.leaves(result) if x.is_floating_point()]).sum()

    def by_autograd(varying: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tree:
        leaves = tuple(x.clone().requires_grad_() for x in varying)
        value = scalar(leaves, others)
        return value.detach(), torch.autograd.grad(value, leaves)

    def split(values: Sequence[Tensor | P]) -> tuple[tuple[Tensor | P, ...], ...]:
        return tuple(tuple(x for x, each in zip(values, varies, strict=True) if each is wanted) for wanted in (True, False))

    in_specs = split(specs)
    return [*parts, Part("gradient", value_and_grad(scalar), by_autograd, split(args), in_specs, (P(), in_specs[0]))]


def run(function: Function, mesh: str) -> list[Outcome]:
    """What becomes of each part of `function` on a mesh."""
    return [_outcome(function, mesh, part) for part in parts_of(function, mesh)]


def _outcome(function: Function, mesh: str, part: Part) -> Outcome:
    expected = part.reference(*part.args)
    case = (function.name, mesh, part.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicatedFallback)
            lowered = jit(part.fn, mesh=MESHES[mesh][0], in_specs=part.in_specs, out_specs=part.out_specs).lower(*part.args)
    except MparError as error:
        return Outcome(*case, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(*case, "crash", f"{type(error).__name__}: {error}")
    used = lowered.collectives()
    sizes = [MESHES[mesh][0].axis_size(each.axes) for each in used]
    facts = {
        "collectives": tuple(Counter(f"{each.op} {' x '.join(each.axes)}" for each in used).items()),
        "sent": round(sum(sent_bytes(each.op, each.bytes, size) for each, size in zip(used, sizes, strict=True))),
        "needless": _needless(function, part, used),
    }
    try:
        difference = _difference(lowered.simulate(*part.args), expected)
    except Exception as error:  # of a graph that passed the check: what it computes is no result
        difference = f"{type(error).__name__}: {error}"
    return Outcome(*case, "wrong" if difference else "exact", difference, **facts)


def _needless(function: Function, part: Part, used: Sequence[Collective]) -> int:
    """How many values are gathered over each mesh axis beyond those that have to be."""
    allowed = Counter({axis: len(values) for axis, values in function.gathers.items()})
    if part.name == "gradient":
        allowed.update({axis: len(values) for axis, values in function.gradient_gathers.items()})
    gathered = Counter(axis for each in used if each.op in GATHERING for axis in each.axes)
    return (gathered - allowed).total()


def _difference(actual: Tree, expected: Tree) -> str:
    """How two trees of results differ; empty if they agree as closely as `mpar.testing` asks of their dtypes."""
    problems = []
    for (path, have), (_, want) in zip(tree.leaves_with_path(actual), tree.leaves_with_path(expected), strict=True):
        if have.dtype != want.dtype:
            problems.append(f"result {path} has dtype {have.dtype}, expected {want.dtype}")
        elif not want.is_floating_point():
            problems += [] if torch.equal(have, want) else [f"result {path} differs"]
        else:
            try:
                testing.assert_close(have, want, name=f"result {path}")
            except AssertionError as error:
                problems.append(str(error))
    return "; ".join(problems)
