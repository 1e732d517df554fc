"""Which mesh axes shard the factors of an op, given the specs of its operands, and the specs that follow from that."""

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from mpar.mesh import Mesh
from mpar.sharding._rules import NodeRule
from mpar.spec import P

__all__ = ["FactorAxes", "axes_in_order", "operand_specs", "result_specs"]

FactorAxes: TypeAlias = dict[str, tuple[str, ...]]
"""For each factor that is sharded the mesh axes that shard it, major first."""


def axes_in_order(mesh: Mesh, rule: NodeRule, specs: Sequence[P], order: Sequence[int], gathered: Sequence[str]) -> FactorAxes:
    """The mesh axes of each factor if operands have their say in this order, and the factors `gathered` are not sharded."""
    axes_of: FactorAxes = {}
    used: set[str] = set()
    unsharded = {*rule.replicate, *rule.follows, *gathered}
    unsharded |= {name for name, i in rule.ragged.items() if not specs[i].axes}
    for i in rule.as_is:  # a factor that is not sharded in an operand which the op takes as it is, is sharded in no operand
        unsharded |= {name for dim, names in enumerate(rule.factors[i]) for name in names if not specs[i].dim(dim)}
    for i in order:
        for dim, names in enumerate(rule.factors[i]):
            remaining = list(specs[i].dim(dim))
            for name in names:
                taken: tuple[str, ...] = ()
                while remaining and name not in unsharded:
                    wider = (*taken, remaining[0])
                    if remaining[0] in used and axes_of.get(name, ())[: len(wider)] != wider:
                        break
                    if rule.sizes[name] % mesh.axis_size(wider):
                        break
                    taken = wider
                    remaining.pop(0)
                if name not in axes_of and taken:
                    axes_of[name] = taken
                    used.update(taken)
                if taken != axes_of.get(name, ()) or mesh.axis_size(taken) != rule.sizes[name]:
                    break  # minor factors are not sharded: the shard of this dim would not be contiguous
    for name, leader in rule.follows.items():
        axes = _followed(name, rule, specs)
        if axes and set(axes) <= set(axes_of.get(leader, ())):
            axes_of[name] = axes
    return _contiguous(mesh, rule, axes_of)


def operand_specs(mesh: Mesh, rule: NodeRule, specs: Sequence[P], axes_of: FactorAxes, passed: set[str]) -> list[P]:
    """The specs to which operands are moved. Pending sums over the axes `passed` stay pending."""
    targets = []
    for i, (spec, dims) in enumerate(zip(specs, rule.factors, strict=True)):
        if i in rule.as_is:
            staying = (() if rule.replicate & set(names) else spec.dim(dim) for dim, names in enumerate(dims))
            targets.append(P(*staying, partial=spec.partial))
        else:
            targets.append(P(*_dims_of(dims, axes_of), partial=mesh.ordered(set(spec.partial) & passed)))
    return targets


def result_specs(mesh: Mesh, rule: NodeRule, axes_of: FactorAxes, passed: set[str]) -> list[P]:
    """The specs of the results. One whose dims lack a factor is a pending sum over the axes that shard this factor."""
    specs = []
    for dims in rule.results:
        dim_axes = _dims_of(dims, axes_of)
        sharding = {axis for axes in dim_axes for axis in axes}
        summed = {axis for factor, axes in axes_of.items() if not _appears(factor, dims) for axis in axes} - sharding
        specs.append(P(*dim_axes, partial=mesh.ordered(summed | passed)))
    return specs


def _followed(name: str, rule: NodeRule, specs: Sequence[P]) -> tuple[str, ...]:
    """The axes that shard `name`, a factor that follows another one: those of the first operand in which it
    alone makes a dim. Operands that the op takes as they are come first.
    """
    order = sorted(range(len(specs)), key=lambda i: (i not in rule.as_is, i))
    return next((specs[i].dim(rule.factors[i].index((name,))) for i in order if (name,) in rule.factors[i]), ())


def _contiguous(mesh: Mesh, rule: NodeRule, axes_of: FactorAxes) -> FactorAxes:
    """`axes_of` without the factors whose shards would not be contiguous in some dim.

    In a dim made of several factors, one may be sharded only if each factor that is major to it has one element per rank.
    """
    for names in (names for dims in (*rule.factors, *rule.results) for names in dims):
        for major, minor in itertools.pairwise(names):
            if minor in axes_of and mesh.axis_size(axes_of.get(major, ())) != rule.sizes[major]:
                return _contiguous(mesh, rule, {name: axes for name, axes in axes_of.items() if name != minor})
    return axes_of


def _dims_of(dims: tuple[tuple[str, ...], ...], axes_of: FactorAxes) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dim of a tensor, from those of the factors that make the dim."""
    out = []
    for names in dims:
        axes: tuple[str, ...] = ()
        for name in names:
            axes = (*axes, *axes_of.get(name, ()))
        out.append(axes)
    return out


def _appears(factor: str, dims: tuple[tuple[str, ...], ...]) -> bool:
    return any(factor in names for names in dims)
