"""What is wrong with a primitive by itself, before its rule is compared with its implementation on ranks."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ConfigError
from mpar.ops import Cost, Operand, Primitive, Static
from mpar.user_code import user_code

__all__ = ["check_declared"]


def check_declared(primitive: Primitive, operands: Sequence[Operand] | None, params: Mapping[str, Static]) -> None:
    """Raise ConfigError, with all problems, unless the primitive has the rules that a check needs, takes these operands, and its
    implementation returns what its abstract rule says.

    operands: None if they are those of a function around the primitive: then only its rules are looked for.
    """
    if not isinstance(primitive, Primitive):
        raise ConfigError(f"cannot check {primitive!r}: pass the object that Primitive(...) made, such as squared_relu_p")
    problems = [*_missing(primitive)]
    if operands is not None:
        problems += _operand_problems(primitive, operands, params)
    if operands is not None and not problems:
        found = (_rank_problems, _result_problems, _cost_problems)
        problems = [line for problems_of in found for line in problems_of(primitive, operands, params)]
    if problems:
        raise ConfigError(f"cannot check primitive {primitive.name!r}:\n  " + "\n  ".join(problems))


def _missing(primitive: Primitive) -> Iterator[str]:
    for rule, label in (
        (primitive.abstract, "def_abstract"),
        (primitive.impl, "def_impl"),
        (primitive.placement.rule, "def_sharding"),
    ):
        if rule is None:
            yield f"it has no {label}"


def _operand_problems(primitive: Primitive, operands: Sequence[Operand], params: Mapping[str, Static]) -> Iterator[str]:
    if len(operands) != len(primitive.operands):
        yield f"{len(operands)} operands are given, it takes {len(primitive.operands)}: {', '.join(primitive.operands)}"
    unknown = sorted(set(params) - set(primitive.params))
    if unknown:
        yield f"the parameters {unknown} are given, it takes {sorted(primitive.params)}"


def _rank_problems(primitive: Primitive, operands: Sequence[Operand], params: Mapping[str, Static]) -> Iterator[str]:
    """Operands with another number of dims than their entry in the sharding rule."""
    for name, x, dims in zip(primitive.operands, operands, primitive.sharding_rule(**params).operands, strict=True):
        fixed = [dim for dim in dims if dim != ("...",)]
        if isinstance(x, Tensor) and (x.ndim < len(fixed) or (x.ndim > len(fixed) and len(fixed) == len(dims))):
            yield f"operand {name} {tuple(x.shape)} has {x.ndim} dims, its sharding rule {len(fixed)}"


def _cost_problems(primitive: Primitive, operands: Sequence[Operand], params: Mapping[str, Static]) -> Iterator[str]:
    if primitive.cost is None:
        return
    with user_code(f"the cost of primitive {primitive.name!r}"):
        cost = primitive.cost(*tree.map_leaves(lambda x: None if x is None else x.to("meta"), tuple(operands)), **params)
    if not isinstance(cost, Cost) or not all(type(number) is int for number in (cost.flops, cost.bytes, cost.workspace)):
        yield f"its cost is {cost}: it must be a Cost whose flops, bytes and workspace are whole numbers"


def _result_problems(primitive: Primitive, operands: Sequence[Operand], params: Mapping[str, Static]) -> list[str]:
    copies = tree.map_leaves(lambda x: None if x is None else x.detach().clone(), tuple(operands))
    with torch.no_grad():
        with user_code(f"the abstract rule of primitive {primitive.name!r}"):
            claimed = tree.leaves(primitive.abstract(*copies, **params))  # type: ignore[misc]
        with user_code(f"the implementation of primitive {primitive.name!r}"):
            given = tree.leaves(primitive.meaning(*copies, **params))
    looks = [[f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in found] for found in (claimed, given)]
    return (
        []
        if looks[0] == looks[1]
        else [f"its abstract rule says {', '.join(looks[0])}; its implementation gives {', '.join(looks[1])}"]
    )
