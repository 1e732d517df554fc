"""Which mesh axes shard the factors of an op, and which sums it leaves pending: the choice that makes a lowering fast or slow."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES, Marks, decode_axes, primitive_of
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._factor_axes import axes_in_order, operand_specs, result_specs
from mpar.sharding._local_nodes import LocalNodes
from mpar.sharding._redistribute import plan, plan_bytes
from mpar.sharding._rules import NodeRule, has_rule, is_float_cast, may_gather, programs_of, rule_of
from mpar.spec import P, normalise
from mpar.strategy import AxisTable, spec_from_axes

__all__ = ["AxisChoice", "spec_of_axes"]

_CONSTRAIN, _CONSTRAIN_BWD = PRIMITIVES["constrain"].op, PRIMITIVES["constrain_bwd"].op


class AxisChoice:
    """The choice for the nodes of one graph, whose operands lie as `nodes` says.

    marks: by the number of a `constrain`, the spec that its operand had before; it grows while nodes are lowered.
    """

    def __init__(self, nodes: LocalNodes, table: AxisTable, marks: Mapping[int, P]) -> None:
        self.nodes, self.mesh, self.table, self.marks = nodes, nodes.mesh, table, marks
        self.hints: dict[fx.Node, P] = {}  # logical node -> the spec that is preferred for it
        self.may_stay_pending: set[fx.Node] = set()  # results whose spec the caller leaves open, and what they view

    def take_free(self, results: Sequence[fx.Node]) -> None:
        """Note the results whose spec the caller leaves open."""
        self.may_stay_pending = {source for node in results for source in _seen_through_views(node)}

    def take_hints(self, hints: Sequence[P | None]) -> None:
        """Note each hint for the node that makes the result.

        An element-wise op passes its hint on to operands of its shape; so does an op for which `_may_grow` holds.
        """
        todo = [(node, hint) for node, hint in zip(self.nodes.logical.results, hints, strict=False) if hint is not None]
        while todo:
            node, hint = todo.pop()
            if node in self.hints or node.op != "call_function":
                continue
            self.hints[node] = normalise(hint, self.mesh)
            if _may_grow(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
                todo.extend((used, hint) for used in node.all_input_nodes if shape_of(used) == shape_of(node))

    def choose(self, node: fx.Node, rule: NodeRule, specs: list[P]) -> dict[str, tuple[str, ...]]:
        """Choose the mesh axes that shard each factor: those that shard it in an operand, if no other factor uses them yet.

        Operands have their say one after the other: first those that the op takes as they are, then those that lead by its rule,
        then those with larger shards. So where two operands want one axis for different factors, the smaller one is moved, which
        takes smaller messages. Another order is taken if the op as a whole then receives fewer bytes: the operands that move, and
        the pending sums that are left. So is an order in which an op of torch gathers what it works across, unless every rank
        would then do much work that is divided otherwise.
        """
        local_bytes = [
            x.meta["val"].nbytes / self.mesh.axis_size(tuple(axis for dim in spec.dims for axis in dim))
            for x, spec in zip(rule.operands, specs, strict=True)
        ]
        order = sorted(range(len(specs)), key=lambda i: (i not in rule.as_is, i not in rule.leads, -local_bytes[i], i))
        ways = [axes_in_order(self.mesh, rule, specs, order, ())]
        if not (rule.as_is or rule.leads or rule.follows or rule.ragged):
            ways += [axes_in_order(self.mesh, rule, specs, [i, *(j for j in order if j != i)], ()) for i in order[1:]]
        if may_gather(node) and (programs := programs_of(node)):
            ways.append(axes_in_order(self.mesh, rule, specs, order, tuple(programs)))
        distinct = [way for index, way in enumerate(ways) if way not in ways[:index]]
        return min(distinct, key=lambda way: self.received(node, rule, specs, way)) if len(distinct) > 1 else distinct[0]

    def received(self, node: fx.Node, rule: NodeRule, specs: list[P], axes_of: dict[str, tuple[str, ...]]) -> int:
        """The bytes that a rank receives for an op whose factors are sharded so, with the carrying out of the sums that it leaves
        pending, or that its local program carries out."""
        passed = self.pass_partial(node, rule, specs, axes_of)
        targets = operand_specs(self.mesh, rule, specs, axes_of, passed)
        total = sum(self.nodes.cheapest(operand, target)[0] for operand, target in zip(rule.operands, targets, strict=True))
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        for value, spec in zip(values, result_specs(self.mesh, rule, axes_of, passed), strict=True):
            if isinstance(value, Tensor):
                total += plan_bytes(plan(spec, spec.without_partial(), value.ndim, self.mesh), value.nbytes, self.mesh)
        return total

    def follow_hints(self, node: fx.Node, rule: NodeRule, specs: list[P], axes_of: dict[str, tuple[str, ...]]) -> None:
        """Shard factors that are in results but in no operand as the hints say, over axes that the op does not use otherwise."""
        results = [node] if len(rule.results) == 1 else [None] * len(rule.results)
        if len(rule.results) > 1:
            for user in node.users:
                results[user.args[1]] = user
        in_operands = {name for dims in rule.factors for names in dims for name in names}
        used = {axis for axes in axes_of.values() for axis in axes} | {axis for spec in specs for axis in spec.partial}
        for result, dims in zip(results, rule.results, strict=True):
            hint = self.hint_of(result) if result is not None else None
            for dim, names in enumerate(dims if hint is not None else ()):
                assert hint is not None
                axes = hint.dim(dim)
                taken = in_operands | set(axes_of) | set(rule.replicate)
                free = len(names) == 1 and not set(names) & taken and not set(axes) & used
                if axes and free and rule.sizes[names[0]] % self.mesh.axis_size(axes) == 0:
                    axes_of[names[0]] = axes
                    used |= set(axes)

    def hint_of(self, node: fx.Node) -> P | None:
        """The spec that is preferred for a result: its hint; without one, the spec to which a mark that reads it moves it."""
        for user in node.users if node not in self.hints else ():
            if user.target == _CONSTRAIN:
                axes = decode_axes(user.kwargs["axes"])
                return normalise(axes, self.mesh) if isinstance(axes, P) else spec_of_axes(axes, self.table, self.mesh)
            if user.target == _CONSTRAIN_BWD:
                return self.marks[user.kwargs["mark"]]
        return self.hints.get(node)

    def pass_partial(self, node: fx.Node, rule: NodeRule, specs: list[P], axes_of: dict[str, tuple[str, ...]]) -> set[str]:
        """The mesh axes over which operands are pending sums, and the op leaves them pending: so are its results then.

        An op that is linear in all operands together leaves those sums pending that all operands have. Any other op must be
        linear in the one operand that is a pending sum over an axis. Its results must not have more bytes than that operand,
        because to sum them later would then move more bytes than to sum the operand now; unless they are added to a sum that is
        pending over the same axis, so that no reduction is needed for them alone.

        A cast to a narrower dtype is linear but for rounding. It leaves sums pending only for a caller who adds them up later, as
        a step adds up the gradients of its microbatches.
        """
        used = {axis for axes in axes_of.values() for axis in axes}
        pending = [set(spec.partial) for spec in specs]
        if rule.jointly:
            return set.intersection(*pending) - used if pending else set()
        out_bytes = sum(v.nbytes for v in _tensors(node.meta["val"]))
        passed = set()
        casts = {0} if node in self.may_stay_pending and is_float_cast(node) else set()
        for i in rule.linear | casts:
            only_here = pending[i] - used - set().union(*(p for j, p in enumerate(pending) if j != i))
            if out_bytes <= rule.operands[i].meta["val"].nbytes or _may_grow(node):
                passed |= only_here
            elif only_here:
                passed |= only_here & self.joined_axes(node)
        return passed

    def joined_axes(self, node: fx.Node) -> set[str]:
        """The mesh axes over which all is pending that the result of `node` is added to; empty if it is read by anything else."""
        users = list(node.users)
        if len(users) != 1 or not has_rule(users[0]) or not (rule := rule_of(users[0])).jointly:
            return set()
        others = [operand for operand in rule.operands if operand is not node]
        known = [set(self.nodes.specs[operand].partial) if operand in self.nodes.specs else set() for operand in others]
        return set.intersection(*known) if known else set()


def spec_of_axes(axes: Marks, table: AxisTable, mesh: Mesh) -> P:
    """The spec that the strategy's table gives for the logical axes of `ops.constrain`; a dim with `...` is not sharded in it."""
    return spec_from_axes([None if axis is ... else axis for axis in axes], table, mesh)


def _seen_through_views(node: fx.Node) -> list[fx.Node]:
    """A node and, if it is a view, all that it views."""
    nodes = [node]
    while nodes[-1].target in (torch.ops.aten.reshape.default, torch.ops.aten.permute.default):
        nodes.append(nodes[-1].args[0])
    return nodes


def _may_grow(node: fx.Node) -> bool:
    """Whether a pending sum may pass through an op even if the result has more bytes."""
    primitive = primitive_of(node.target)
    return primitive is not None and primitive.placement.may_grow_pending


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in tree.leaves(value) if isinstance(v, Tensor)]
