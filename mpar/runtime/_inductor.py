"""Inductor: torch.compile compiles the code of a segment further, and fuses its operations, also with those of references.

A reference is traced: what it computes becomes part of the graph of the segment. Every other implementation, and a reference that
says so, stays opaque: the code calls it as a torch op of its own, and Inductor knows the shapes of its results from the abstract
rule. An op that overwrites operands tells Inductor which.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpar.kernels import REFERENCE, implementation
from mpar.ops import PRIMITIVES, Primitive
from mpar.runtime.comm import Comm

__all__ = ["compiled", "for_inductor"]

Code = Callable[[list[Tensor], Comm], tuple[Tensor, ...]]
_FLAT = """def flat(comm, *operands):
    return run(list(operands), comm)
"""
_LIBRARY = torch.library.Library("mpar_kernels", "DEF")


@functools.cache
def for_inductor(primitive: str, name: str = REFERENCE) -> Callable[..., object]:
    """What code that Inductor compiles calls for the implementation `name` of `primitive`: a torch op of its own."""
    declared, op, run = PRIMITIVES[primitive], f"{primitive}_{name}", implementation(primitive, name)
    schema = str(declared.op._schema).removeprefix(f"mpar::{primitive}")
    call = functools.partial(getattr, torch.ops.mpar_kernels, op)
    if name == REFERENCE and not declared.opaque:
        _LIBRARY.define(f"{op}{schema}")
        _LIBRARY.impl(op, run, "CompositeImplicitAutograd")  # torch traces what it calls
        return call().default
    if not declared.mutates:
        _define_opaque(op, schema, run, declared.abstract)
        return call().default
    _define_opaque(op, _overwriting(schema, declared), _without_results(run), lambda *_, **__: None)
    return _results_of(call().default, declared)


def _define_opaque(op: str, schema: str, run: Callable[..., object], abstract: Callable[..., object] | None) -> None:
    """Define an op that torch does not look into."""
    _LIBRARY.define(f"{op}{schema}")
    _LIBRARY.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpar_kernels::{op}", abstract, lib=_LIBRARY)


def _overwriting(schema: str, primitive: Primitive) -> str:
    """The schema of an op that overwrites the operands that `primitive` overwrites, and returns nothing."""
    operands, _ = schema.split(" -> ")
    for index, name in enumerate(primitive.mutates):
        for kind in ("Tensor", "Tensor[]"):
            overwritten = kind.replace("Tensor", f"Tensor(a{index}!)")
            operands = operands.replace(f"({kind} {name}", f"({overwritten} {name}").replace(f", {kind} {name}", f", {overwritten} {name}")
    return f"{operands} -> ()"


def _without_results(run: Callable[..., object]) -> Callable[..., None]:
    """`run`, whose results are operands, so that the caller has them."""

    def call(*operands: Any, **params: Any) -> None:
        run(*operands, **params)

    return call


def _results_of(call: Callable[..., None], primitive: Primitive) -> Callable[..., object]:
    """`call`, with the operands that are the results of a primitive: those that it names first among what it overwrites."""
    places = [primitive.operands.index(name) for name in primitive.mutates[: len(primitive.results)]]

    def with_results(*operands: Any, **params: Any) -> object:
        call(*operands, **params)
        results = tuple(operands[place] for place in places)
        return results if len(results) > 1 else results[0]

    return with_results


def compiled(run: Code) -> Code:
    """`run` compiled by Inductor when it is first called. Its operands are not freed before it returns."""
    names: dict[str, Any] = {"run": run}
    exec(_FLAT, names)  # a code object of its own: torch counts how often one is compiled, and then gives it up
    function = torch.compile(names["flat"], dynamic=False)

    def call(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        operands = tuple(args)
        args.clear()
        return function(comm, *operands)

    return call
