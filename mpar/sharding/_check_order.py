"""Check the order of shards: a dim that several mesh axes shard, or several factors make, must be cut in one order everywhere.

`_check.py` looks at one mesh axis at a time and cannot see this. Here all axes are looked at together.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from mpar.sharding import _collectives as collectives
from mpar.sharding._control import CONTROL
from mpar.sharding._derive import derived_rule
from mpar.sharding._lower import RankGraph
from mpar.sharding._rules import Factors, NodeRule, tensor_operands
from mpar.spec import P

__all__ = ["check_order", "specs_of"]

Fail = Callable[[fx.Node, str], None]


def check_order(ranked: RankGraph, fail: Fail) -> None:
    """Call `fail(node, why)` for each node whose result is not cut into shards in the same order as its operands."""
    local = {node: node.meta["val"] for node in ranked.graph.nodes if node.op != "output"}
    for node in local:
        node.meta["val"] = _global(node, ranked)
    try:
        for node in local:
            if node.meta.get("opaque"):
                continue  # only the author of the local program knows where its values are
            if node.target in CONTROL.values():
                continue  # its bodies are checked by themselves
            if node.target in (*collectives.COLLECTIVES, collectives.shard):
                _check_collective(node, ranked, fail)
            elif node.op == "call_function" and node.target not in (operator.getitem, collectives.start):
                _check_op(node, ranked, fail)
    finally:
        for node, value in local.items():
            node.meta["val"] = value


def _global(node: fx.Node, ranked: RankGraph) -> Any:
    value, specs = node.meta["val"], specs_of(node)
    if isinstance(value, (tuple, list)):
        return tuple(_wide(v, spec, ranked) for v, spec in zip(value, specs, strict=True))
    return _wide(value, specs[0], ranked)


def _wide(value: Any, spec: P | None, ranked: RankGraph) -> Any:
    if spec is None or not isinstance(value, Tensor):
        return value
    return value.new_empty([n * ranked.mesh.axis_size(spec.dim(i)) for i, n in enumerate(value.shape)])


def specs_of(node: fx.Node) -> list[P | None]:
    """The spec of each result of a node; if there are several, the nodes of the items have them, or the node if nothing reads the
    item."""
    if not isinstance(node.meta["val"], (tuple, list)):
        return [node.meta.get("spec")]
    claims = {user.args[1]: user.meta.get("spec") for user in node.users if user.target is operator.getitem}
    unread = node.meta.get("result_specs") or [None] * len(node.meta["val"])
    return [claims.get(index, unread[index]) for index in range(len(node.meta["val"]))]


def _check_collective(node: fx.Node, ranked: RankGraph, fail: Fail) -> None:
    axes, kwargs = node.kwargs["axes"], node.kwargs
    if kwargs["size"] != ranked.mesh.axis_size(axes):
        fail(node, f"its size is {kwargs['size']}, and {axes} have {ranked.mesh.axis_size(axes)} ranks")
    before, after = node.args[0].meta.get("spec"), node.meta.get("spec")
    if before is None or after is None:
        return
    rank = node.meta["val"].ndim
    old, new = list(before.padded(rank)), list(after.padded(rank))
    if node.target is collectives.all_gather:
        new[kwargs["dim"]] = (*new[kwargs["dim"]], *axes)
    elif node.target is collectives.all_to_all:
        new[kwargs["src"]], old[kwargs["dst"]] = (*new[kwargs["src"]], *axes), (*old[kwargs["dst"]], *axes)
    elif node.target is not collectives.all_reduce:
        old[kwargs["dim"]] = (*old[kwargs["dim"]], *axes)
    if old != new:
        fail(node, f"it takes {before} to {after}, which is another order of shards than it makes")


def _check_op(node: fx.Node, ranked: RankGraph, fail: Fail) -> None:
    claims = specs_of(node)
    if any(operand.meta.get("spec") is None for operand in tensor_operands(node)) or all(spec is None for spec in claims):
        return  # inside a local program: only its author knows where the values are
    rule = derived_rule(node)
    free = {i for i in rule.as_is if not any(rule.factors[i])}  # the result does not depend on the specs of these operands
    specs = [*(None if i in free else operand.meta.get("spec") for i, operand in enumerate(rule.operands)), *claims]
    agreed: dict[str, tuple[str, ...]] = {}
    for spec, dims in zip(specs, (*rule.factors, *rule.results), strict=False):
        if spec is None:
            continue
        axes_by_factor = _factor_axes(node, spec, dims, rule, ranked, fail)
        for name in {name for names in dims for name in names}:
            axes = axes_by_factor.get(name, ())
            if agreed.setdefault(name, axes) != axes:
                fail(node, f"factor {name} is sharded by {agreed[name]} in one place and by {axes} in another")


def _factor_axes(
    node: fx.Node, spec: P, dims: Factors, rule: NodeRule, ranked: RankGraph, fail: Fail
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that shard each factor. The axes of a dim go to its factors, major first; the next factor gets axes only if
    the one before has one element per rank."""
    out: dict[str, tuple[str, ...]] = {}
    for names, axes in zip(dims, spec.padded(len(dims)), strict=True):
        remaining = list(axes)
        for name in names:
            taken: tuple[str, ...] = ()
            while remaining and rule.sizes[name] % ranked.mesh.axis_size((*taken, remaining[0])) == 0:
                taken = (*taken, remaining.pop(0))
            out[name] = taken
            if ranked.mesh.axis_size(taken) != rule.sizes[name]:
                break
        if remaining:
            fail(node, f"a dim made of {names or 'nothing that shards'} cannot be cut by {axes}")
    return out
