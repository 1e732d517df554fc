"""Check: infer where the values of a rank graph are from the graph alone, and compare with what the lowering says.

Along every mesh axis a value has a type: it is replicated, sharded along a dim, or a pending sum. The types are inferred for one
mesh axis at a time, from the specs of the inputs and from what each op does, and compared with the spec on each node.

Nodes of local programs are checked as all others are: this proves of a program like that of softmax that every value in it is
replicated, sharded, a pending sum or a pending maximum as its collectives need it, and that no op reads a pending value in which
it is not linear. What the check cannot prove is that the ops of a program compute what the op means: this is tested, on simulated
ranks. Nor can it follow a value that a rank computes from its shard alone, or from its coordinate ("V"): it only proves that such
a value is never returned as replicated unless an all_reduce or an all_gather made it the same.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx

from mpar.errors import MparError, ShardingError
from mpar.ops import primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._check_control import check_flow
from mpar.sharding._check_order import check_order, specs_of
from mpar.sharding._control import CONTROL, bodies_of
from mpar.sharding._derive import derived_rule
from mpar.sharding._lower import RankGraph
from mpar.sharding._rules import NodeRule
from mpar.spec import P

__all__ = ["check"]

Type = str | int  # "R", "P", or the dim that is sharded
"""Along one mesh axis: "R" is the same on all ranks; an int is the sharded dim; "P" is a pending sum; "M" a pending maximum; "V"
varies from rank to rank in a way that only the author of a local program knows."""
Types = Type | Sequence[Type]
"""The type of a node with one result, or those of a node with several."""


def check(ranked: RankGraph) -> None:
    """Raise ShardingError, naming node and line, unless every value has the type that the lowering says it has."""
    for body in bodies_of(ranked.graph):
        _check_one(cast(RankGraph, body))
    _check_one(ranked)


def _check_one(ranked: RankGraph) -> None:
    """Check a graph whose bodies of control flow have been checked."""
    for node in ranked.graph.nodes:
        if node.target in CONTROL.values():
            check_flow(node, specs_of(node), lambda node, why: _fail(ranked, node, why))
    for axis in ranked.mesh.ordered(ranked.mesh.axes):
        _AxisCheck(ranked, axis).run()
    check_order(ranked, lambda node, why: _fail(ranked, node, why))


class _AxisCheck:
    """The check along one mesh axis."""

    def __init__(self, ranked: RankGraph, axis: str) -> None:
        self.ranked, self.axis = ranked, axis
        self.types: dict[fx.Node, Any] = {}

    def run(self) -> None:
        local = {node: node.meta["val"] for node in self.ranked.graph.nodes if node.op != "output"}
        try:
            self.walk()
        finally:
            for node, value in local.items():
                node.meta["val"] = value

    def walk(self) -> None:
        """Infer the types node by node. Meanwhile `meta["val"]` has the shape that the value has if gathered along this axis."""
        specs = iter(self.ranked.in_specs)
        for node in self.ranked.graph.nodes:
            if node.op == "placeholder":
                self.types[node] = self.of_spec(next(specs))
                self.widen(node)
            elif node.op == "get_attr":
                self.types[node] = "R"
            elif node.op == "output":
                for result, spec in zip(node.args[0], self.ranked.out_specs, strict=True):
                    self.expect(result, self.of_spec(spec), "is returned")
            else:
                self.widen(node)
                self.types[node] = self.infer(node)
                if node.meta.get("spec") is not None and isinstance(self.types[node], (str, int)):
                    self.expect(node, self.of_spec(node.meta["spec"]), "is defined")

    def widen(self, node: fx.Node) -> None:
        """Give `meta["val"]` of a node the shape that its value has when it is gathered along this axis."""
        value = node.meta["val"]
        specs = specs_of(node)
        if node.meta.get("opaque") and all(spec is None for spec in specs):
            return
        unclaimed = [spec is None for spec in specs]
        if node.op == "call_function" and (any(unclaimed) if _works_on_shard(node) else all(unclaimed)):  # inside a local program
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            kwargs = kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})
            if node.target is collectives.shard and self.axis in kwargs["axes"]:  # gathered along this axis it is not cut by it
                kwargs = kwargs | {"size": kwargs["size"] // self.ranked.mesh.axis_size(self.axis)}
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except (MparError, RuntimeError) as error:
                self.fail(node, f"its operands do not fit each other: {error}")
        elif isinstance(value, (tuple, list)):
            node.meta["val"] = tuple(self.wide(v, spec) for v, spec in zip(value, specs, strict=True))
        elif isinstance(value, Tensor):
            node.meta["val"] = self.wide(value, specs[0])

    def wide(self, value: Tensor, spec: P | None) -> Tensor:
        at = None if spec is None else self.of_spec(spec)
        size = self.ranked.mesh.axis_size(self.axis)
        return value.new_empty([n * size if i == at else n for i, n in enumerate(value.shape)]) if isinstance(at, int) else value

    def of_spec(self, spec: P) -> Type:
        if self.axis in spec.partial:
            return "P"
        return next((dim for dim, axes in enumerate(spec.dims) if self.axis in axes), "R")

    def expect(self, node: fx.Node, expected: Type, where: str) -> None:
        if self.types[node] != expected:
            self.fail(node, f"it {where} as {_text(expected)} and is {_text(self.types[node])}")

    def fail(self, node: fx.Node, why: str) -> NoReturn:
        _fail(self.ranked, node, f"on mesh axis {self.axis!r} {why}")

    def infer(self, node: fx.Node) -> Types:
        if node.meta.get("opaque"):
            return self.opaque(node)
        if node.target is operator.getitem:
            types = self.types[node.args[0]]
            now = types[node.args[1]] if isinstance(types, list) else types
            return self.claim(node) if now == "V" else now
        if node.target is collectives.start:
            return "V" if self.axis in node.kwargs["axes"] else "R"
        if node.target in (*collectives.COLLECTIVES, collectives.shard):
            return self.collective(node)
        if node.target in CONTROL.values():
            return self.flow(node)
        return self.op(node)

    def flow(self, node: fx.Node) -> Types:
        """The types of the results of control flow, of which `check_flow` has proved that they are those that its bodies give."""
        for operand in node.args[0]:
            self.expect(operand, self.of_spec(operand.meta["spec"]), "enters control flow")
        return [self.of_spec(spec) for spec in specs_of(node) if spec is not None]

    def collective(self, node: fx.Node) -> Type:
        now = self.types[node.args[0]]
        if now == "M" and not self.carries_out_maximum(node):
            self.fail(node, "moves a pending maximum")
        if self.axis not in node.kwargs["axes"]:
            if now == "P" and node.target is collectives.all_reduce and node.kwargs["op"] == "max":
                self.fail(node, "takes the maximum of a pending sum")
            return now
        rules: dict[Callable, tuple[Any, Any]] = {
            collectives.all_gather: (node.kwargs.get("dim"), "R"),
            collectives.reduce_scatter: ("P", node.kwargs.get("dim")),
            collectives.all_reduce: ("M" if node.kwargs.get("op") == "max" else "P", "R"),
            collectives.all_to_all: (node.kwargs.get("src"), node.kwargs.get("dst")),
            collectives.shard: ("R", node.kwargs.get("dim")),
        }
        before, after = rules[node.target]
        if now != before and not (now == "V" and node.target in (collectives.all_reduce, collectives.all_gather)):
            self.fail(node, f"needs an operand that is {_text(before)}, got {_text(now)}")
        return after

    def carries_out_maximum(self, node: fx.Node) -> bool:
        return node.target is collectives.all_reduce and node.kwargs["op"] == "max"

    def op(self, node: fx.Node) -> Types:
        rule = derived_rule(node)
        types = [self.types[operand] for operand in rule.operands]
        numbers = [self.types[n] for n in node.all_input_nodes if n not in rule.operands]
        if "M" in types:
            self.fail(node, "reads a pending maximum")
        if "V" in types or "V" in numbers:
            return self.varying(node, rule, types)
        factor, partial = None, False
        types = ["R" if i in rule.as_is else now for i, now in enumerate(types)]
        for operand, now, dims in zip(rule.operands, types, rule.factors, strict=True):
            if isinstance(now, int):
                names = dims[now]
                names = tuple(rule.follows.get(name, name) for name in names)
                if not names and _works_on_shard(node):
                    return self.varying(node, rule, types)
                if not names:
                    self.fail(
                        node, f"operand %{operand.name} is sharded along dim {now}, which the op does not treat independently"
                    )
                factor = factor or self.shared_factor(node, names, rule, types)
                if factor not in names:
                    self.fail(node, f"operands are sharded along different factors, {factor} and {names}")
            partial = partial or now == "P"
        if factor is not None and partial:
            self.fail(node, f"reads pending sums beside operands that are sharded along factor {factor}")
        if factor is not None:
            return self.sharded(node, rule, types, factor)
        if partial:
            return self.pending(node, rule, types)
        return ["R"] * len(rule.results) if isinstance(node.meta["val"], (tuple, list)) else "R"

    def shared_factor(self, node: fx.Node, names: tuple[str, ...], rule: NodeRule, types: list) -> str:
        """Of the factors that make a sharded dim, the one that this axis shards.

        It is the first that all sharded operands have along their sharded dims, and no other operand has; else the major one.
        """
        for name in names:
            others = [dims[t] for dims, t in zip(rule.factors, types, strict=True) if isinstance(t, int)]
            having = [any(name in d for d in dims) for dims in rule.factors]
            if all(name in other for other in others) and all(
                isinstance(t, int) for t, has in zip(types, having, strict=True) if has
            ):
                return name
        return names[0]

    def sharded(self, node: fx.Node, rule: NodeRule, types: list, factor: str) -> Types:
        """The types of the results of an op whose operands are sharded along `factor`."""
        primitive = primitive_of(node.target)
        declared = primitive.sharding_rule(**node.kwargs).need_replication if primitive else rule.replicate
        if factor in declared and _works_on_shard(node):
            return "M" if node.target == torch.ops.aten.amax.default else self.varying(node, rule, types)
        if factor in declared:
            self.fail(node, f"is sharded along factor {factor}, across which it works")
        if primitive and factor in primitive.placement.sharded:
            self.fail(node, f"is sharded along factor {factor}, and not told which part this rank holds")
        following = {name for name, leader in rule.follows.items() if leader == factor}
        for i, (operand, now, dims) in enumerate(zip(rule.operands, types, rule.factors, strict=True)):
            has = any(factor in names for names in dims)
            may = any(following & set(names) for names in dims) or i in rule.as_is
            if has != isinstance(now, int) and not may:
                self.fail(node, f"factor {factor} is sharded, yet operand %{operand.name} is {_text(now)}")
        along = {factor} | {name for name in following if self.axis in self.followed(name, rule)}
        results = []
        for dims in rule.results:
            at = [i for i, names in enumerate(dims) if along & set(names)]
            results.append(at[0] if at else "P")
        return results if isinstance(node.meta["val"], (tuple, list)) else results[0]

    def followed(self, name: str, rule: NodeRule) -> tuple[str, ...]:
        """The mesh axes that shard a factor which follows another one, read from the spec of an operand that has it."""
        for operand, dims in zip(rule.operands, rule.factors, strict=True):
            if (name,) in dims and operand.meta.get("spec") is not None:
                return operand.meta["spec"].dim(dims.index((name,)))
        return ()

    def pending(self, node: fx.Node, rule: NodeRule, types: list) -> Types:
        """The types of the results of an op that reads pending sums, in which it must be linear."""
        pending = [i for i, now in enumerate(types) if now == "P"]
        linear = (rule.jointly and len(pending) == len(types)) or (len(pending) == 1 and pending[0] in rule.linear)
        if not linear:
            names = [f"%{rule.operands[i].name}" for i in pending]
            self.fail(node, f"reads pending sums {names}, in which it is not linear")
        return ["P"] * len(rule.results) if isinstance(node.meta["val"], (tuple, list)) else "P"

    def varying(self, node: fx.Node, rule: NodeRule, types: list) -> Types:
        """The types of an op, inside a local program, which gives another value on each rank, because it depends on the rank's
        coordinate or works on its shard alone: what the author of the program claims."""
        if "P" in types:
            self.pending(node, rule, types)
        if isinstance(node.meta["val"], (tuple, list)):
            return ["V"] * len(rule.results)
        return self.claim(node)

    def opaque(self, node: fx.Node) -> Type:
        """The type of an op that a local program calls opaque: replicated if it reads replicated values only and does not
        communicate along this axis, or if it is a collective whose result all ranks get; else what the program claims."""
        moved = self.axis in node.kwargs.get("axes", ())
        if moved and node.target in (collectives.all_gather, collectives.all_reduce):
            return "R"
        same = all(self.types[operand] == "R" for operand in node.all_input_nodes) or self.axis in node.meta.get("same", ())
        return "R" if same and not moved else self.claim(node)

    def claim(self, node: fx.Node) -> Type:
        """The type that the author of a local program claims for a value that ranks compute differently: never replicated."""
        if node.meta.get("spec") is None:
            return "V"
        claimed = self.of_spec(node.meta["spec"])
        if claimed == "R":
            self.fail(node, "it is computed differently on each rank, and defined as replicated")
        return claimed


def _works_on_shard(node: fx.Node) -> bool:
    """Whether an op of torch in a local program may work across a sharded dim: it gives a part of a result, which differs from
    rank to rank. Primitives are told which part a rank holds, so they may not."""
    return node.meta.get("in_program", False) and primitive_of(node.target) is None


def _text(kind: Any) -> str:
    return {"R": "replicated", "P": "a pending sum", "M": "a pending maximum", "V": "different on each rank"}.get(
        kind, f"sharded along dim {kind}"
    )


def _fail(ranked: RankGraph, node: fx.Node, why: str) -> NoReturn:
    line = f" ({node.meta['line']})" if node.meta.get("line") else ""
    raise ShardingError(
        f"ill-typed rank graph: %{node.name}{line} = {node.target}{node.args}: {why}.\n"
        f"mesh: {ranked.mesh}. This is a defect of the compiler or of a sharding rule, not of the function."
    )
