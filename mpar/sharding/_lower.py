"""Lower: a logical graph, with specs for its inputs and results, becomes a rank graph: one graph that every rank runs.

Nodes are lowered one after the other. For each node the lowering chooses mesh axes for the factors of its sharding rule, moves
the operands to the specs that follow from this, and adds the op on local shapes. It does this correctly for any specs of the
operands: the choice of specs decides how fast the rank graph is, never what it computes.
"""

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import MparError, ShardingError
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES, Marks, decode_axes, primitive_of
from mpar.sharding import (  # noqa: F401  they fill tables
    _grouped,
    _local_attention,
    _local_borders,
    _local_diagonals,
    _local_norms,
    _local_reductions,
    _local_rows,
    _local_scatters,
    _local_windows,
    _pools,
    _torch_ops,
)
from mpar.sharding._canonicalise import shape_of
from mpar.sharding._choose_axes import AxisChoice, spec_of_axes
from mpar.sharding._control import CONTROL
from mpar.sharding._emit import Emit, Pending, Placed
from mpar.sharding._factor_axes import operand_specs, result_specs
from mpar.sharding._local_nodes import LocalNodes
from mpar.sharding._lower_control import lower_control
from mpar.sharding._rules import (
    NodeRule,
    fixed_program,
    has_rule,
    programs_of,
    rule_of,
    tensor_operands,
)
from mpar.sharding._trace import LogicalGraph, source_line
from mpar.spec import P, check_spec, local_shape, normalise
from mpar.strategy import AxisTable

__all__ = ["RankGraph", "ReplicatedFallback", "lower"]

WITHOUT_GAPS = {torch.ops.aten.native_group_norm.default, torch.ops.aten.native_group_norm_backward.default}
"""Ops that take only operands that are contiguous in memory."""
constrain_p, constrain_bwd_p = PRIMITIVES["constrain"], PRIMITIVES["constrain_bwd"]


class ReplicatedFallback(UserWarning):
    """Every rank computes an op on global operands, because it has no sharding rule or its rule lets no dim be sharded."""


@dataclass(frozen=True)
class RankGraph:
    """A lowered function: a graph on local shapes, with collectives, which every rank runs.

    graph:     each node carries `meta["val"]` (a local tensor without data), `meta["spec"]` and `meta["line"]`, a source line.
    logical:   the graph that was lowered.
    fallbacks: ops that every rank computes on global operands.
    origin:    for each local node that holds the value of a logical node, that logical node.
    """

    graph: fx.Graph
    mesh: Mesh
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    logical: LogicalGraph
    fallbacks: tuple[str, ...] = ()
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict, repr=False)


def lower(
    logical: LogicalGraph,
    mesh: Mesh,
    in_specs: Sequence[P],
    out_specs: Sequence[P | None] | None = None,
    table: AxisTable | None = None,
    hints: Sequence[P | None] = (),
) -> RankGraph:
    """Lower `logical` on `mesh`.

    in_specs:  the spec of each input.
    out_specs: the spec of each result; None leaves a result at the spec that the lowering gives it, pending sums included.
    table:     the mesh axes that shard each logical axis, for the marks of `ops.constrain`.
    hints:     for each result the spec that its user prefers, or None. A dim that no operand has, such as the vocabulary in the
               gradient of an embedding, is computed sharded as the hint says; without a hint it is not sharded.

    Raises ShardingError, listing all offenders, for specs that do not fit the shapes or name axes that the mesh does not have.
    """
    problems = [
        problem
        for name, node, spec in zip(logical.names, logical.placeholders, in_specs, strict=True)
        for problem in check_spec(name, shape_of(node), spec, mesh)
    ]
    for index, (node, spec) in enumerate(zip(logical.results, out_specs or (), strict=False)):
        problems += [] if spec is None else check_spec(f"result {index}", shape_of(node), spec, mesh)
    if problems:
        raise ShardingError("cannot place these tensors:\n  " + "\n  ".join(problems) + f"\nmesh: {mesh}")
    lowering = _Lowering(logical, mesh, table or {})
    lowering.choice.take_hints(hints)
    wanted = [None if spec is None else normalise(spec, mesh) for spec in out_specs or [None] * len(logical.results)]
    return lowering.run([normalise(spec, mesh) for spec in in_specs], wanted)


class _Lowering(LocalNodes):
    """The lowering of one graph."""

    def __init__(self, logical: LogicalGraph, mesh: Mesh, table: AxisTable) -> None:
        super().__init__(logical, mesh)
        self.table = table
        self.tuples: dict[fx.Node, list[tuple[fx.Node, P]]] = {}  # op with several results -> the local node and spec of each
        self.marks: dict[int, P] = {}  # number of a `constrain` -> the spec that its operand had before
        self.choice = AxisChoice(self, table, self.marks)
        self.fallbacks: list[str] = []

    def run(self, in_specs: list[P], out_specs: list[P | None]) -> RankGraph:
        """Lower every node, in order."""
        self.choice.take_free([node for node, spec in zip(self.logical.results, out_specs, strict=True) if spec is None])
        specs = iter(in_specs)
        for node in self.logical.graph.nodes:
            self.current = node
            if node.op == "placeholder":
                spec = next(specs)
                self.define(node, self.placeholder(node, spec), spec)
            elif node.op == "get_attr":
                self.define(node, self.constant(node), P())
            elif node.op == "output":
                results = [self.output(n, spec) for n, spec in zip(node.args[0], out_specs, strict=True)]
                self.graph.output(tuple(local for local, _ in results))
                self.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
                self.graph.lint()
                origin = {local: logical for logical, by_spec in self.placed.items() for local in by_spec.values()}
                return RankGraph(
                    self.graph,
                    self.mesh,
                    tuple(in_specs),
                    tuple(spec for _, spec in results),
                    self.logical,
                    tuple(self.fallbacks),
                    origin,
                )
            else:
                self.lower_call(node)
        raise AssertionError("graph without output")

    def lower_call(self, node: fx.Node) -> None:
        """Lower one call. Errors of torch and of rules become a ShardingError with op and line."""
        try:
            self.call(node)
        except MparError:
            raise
        except Exception as error:
            at = f" at {source_line(node)}" if source_line(node) else ""
            placed = ", ".join(f"{shape_of(n)} {self.specs[n]}" for n in tensor_operands(node))
            raise ShardingError(
                f"cannot lower {node.target}{at} for operands {placed}.\n{type(error).__name__}: {error}\n"
                f"mesh: {self.mesh}. Use other ops for it, or place its operands otherwise (ops.constrain)."
            ) from error

    def output(self, node: fx.Node, spec: P | None) -> tuple[fx.Node, P]:
        """The local node of a result at `spec`, and that spec; None stands for the spec that the lowering gave, in mesh order."""
        self.current = node  # collectives that move the result get the source line of the op that made it
        spec = self.in_mesh_order(self.specs[node]) if spec is None else spec
        not_pending = self.mesh.ordered(set(spec.partial) - set().union(*(existing.partial for existing in self.placed[node])))
        if not_pending:
            raise ShardingError(
                f"result {self.logical.results.index(node)} {shape_of(node)} cannot be placed by {spec}: it is not a pending sum "
                f"over {list(not_pending)}, it is {self.specs[node]}.\nmesh: {self.mesh}. Leave `partial` out of its spec."
            )
        return self.redistribute(node, spec), spec

    def in_mesh_order(self, spec: P) -> P:
        """`spec` with every dim cut down to the longest run of its first axes that is in mesh order.

        Inside a graph a dim may be sharded by axes in another order, but not where graphs hand values to each other.
        """
        dims = [next(d[:n] for n in range(len(d), -1, -1) if d[:n] == self.mesh.ordered(d[:n])) for d in spec.dims]
        return P(*dims, partial=spec.partial)

    def redistribute(self, node: fx.Node, target: P) -> fx.Node:
        """The local node that holds `node` at the spec `target`; see `LocalNodes`. What can be made anywhere is not moved."""
        if target not in self.placed[node] and self.made_anywhere(node) and not target.partial:
            return self.make_shard(node, target)
        return super().redistribute(node, target)

    def made_anywhere(self, node: fx.Node) -> bool:
        """Whether each rank can make any shard of a value itself, as of random numbers: no operand has a factor of its dims."""
        primitive = primitive_of(node.target)
        if primitive is None or not primitive.placement.sharded:
            return False
        rule = rule_of(node)
        names = {name for dims in rule.results for factors in dims for name in factors}
        read = {name for dims in rule.factors for factors in dims for name in factors}
        return len(rule.results) == 1 and names <= set(primitive.placement.sharded) and not names & read

    def make_shard(self, node: fx.Node, spec: P) -> fx.Node:
        """The shard of a value for which `made_anywhere` holds, made in its place instead of cut out of the global tensor."""
        rule, placed, first = rule_of(node), self.placed[node], self.specs[node]
        axes_of = {names[0]: spec.dim(dim) for dim, names in enumerate(rule.results[0]) if names and spec.dim(dim)}
        locals_ = [self.redistribute(operand, P()) for operand in rule.operands]
        self.finish(node, rule, locals_, axes_of, [spec])
        self.placed[node], self.specs[node] = {**placed, **self.placed[node]}, first
        return self.placed[node][spec]

    def call(self, node: fx.Node) -> None:
        """Lower one call: an item of several results, a mark, or an op."""
        if node.target is operator.getitem and node.args[0] in self.tuples:
            local, spec = self.tuples[node.args[0]][node.args[1]]
            self.define(node, local, spec)
        elif node.target == constrain_p.op:
            self.constrain(node)
        elif node.target == constrain_bwd_p.op:
            self.constrain_backward(node)
        elif node.target in CONTROL.values():
            lower_control(self, node)
        else:
            self.apply(node)

    def nested(self, body: LogicalGraph, in_specs: list[P], out_specs: Sequence[P | None]) -> RankGraph:
        """A body of control flow, lowered for these specs; what it computes whole is noted here."""
        lowered = _Lowering(body, self.mesh, self.table).run(in_specs, list(out_specs))
        self.fallbacks += [op for op in lowered.fallbacks if op not in self.fallbacks]
        return lowered

    def constrain(self, node: fx.Node) -> None:
        """Move a value to the spec that `ops.constrain` asks for, and note the spec that it had, for its cotangent."""
        source, axes = node.args[0], decode_axes(node.kwargs["axes"])
        spec = normalise(axes, self.mesh) if isinstance(axes, P) else self.named(source, axes)
        problems = check_spec(f"{source.name} {axes}", shape_of(source), spec, self.mesh, any_order=True)
        if problems:
            where = f" at {source_line(node)}" if source_line(node) else ""
            raise ShardingError(f"cannot place a value{where}:\n  " + "\n  ".join(problems) + f"\nmesh: {self.mesh}")
        self.marks[node.kwargs["mark"]] = self.specs[source]
        local = self.redistribute(source, spec)
        self.alias(node, source, local, spec)

    def named(self, source: fx.Node, axes: Marks) -> P:
        """The spec that `source` gets from `ops.constrain` with the logical axes `axes`.

        A dim with `...` keeps the mesh axes that shard it now, up to the first one that another dim asks for. If there is any
        such dim, pending sums stay pending, except over mesh axes that a dim asks for.
        """
        spec = spec_of_axes(axes, self.table, self.mesh)
        if ... not in axes:
            return spec
        now = self.specs[source]
        dims = []
        for index, axis in enumerate(axes):
            current = now.dim(index)
            # the first axis that another dim takes, and all axes minor to it, leave this dim
            num_staying = next((n for n, mesh_axis in enumerate(current) if mesh_axis in spec.axes), len(current))
            dims.append(current[:num_staying] if axis is ... else spec.dim(index))
        return P(*dims, partial=tuple(axis for axis in now.partial if axis not in spec.axes))

    def constrain_backward(self, node: fx.Node) -> None:
        """Move the cotangent of a constrained value towards the spec that the value had before it was constrained.

        Mesh axes that sharded the value shard the same dims of the cotangent. Over axes over which the value was a pending sum,
        the cotangent is replicated. Over all other axes it stays as it is.
        """
        earlier, cotangent = self.marks[node.kwargs["mark"]], node.args[0]
        now = self.specs[cotangent]
        decided = earlier.axes
        dims = []
        for dim in range(len(shape_of(cotangent))):
            free = tuple(axis for axis in now.dim(dim) if axis not in decided)
            dims.append(self.mesh.ordered({*earlier.dim(dim), *free}) if free else earlier.dim(dim))
        spec = P(*dims, partial=tuple(axis for axis in now.partial if axis not in decided))
        local = self.redistribute(cotangent, spec)
        self.alias(node, cotangent, local, spec)

    def apply(self, node: fx.Node) -> None:
        """Lower an op: choose mesh axes for its factors, move its operands, and add it with local operands."""
        rule = rule_of(node)
        self.note_fallback(node, rule)
        specs = [self.specs[operand] for operand in rule.operands]
        axes_of = self.choice.choose(node, rule, specs)
        self.choice.follow_hints(node, rule, specs, axes_of)
        passed = self.choice.pass_partial(node, rule, specs, axes_of)
        targets = operand_specs(self.mesh, rule, specs, axes_of, passed)
        locals_ = [self.redistribute(operand, target) for operand, target in zip(rule.operands, targets, strict=True)]
        self.finish(node, rule, locals_, axes_of, result_specs(self.mesh, rule, axes_of, passed))

    def finish(self, node: fx.Node, rule: NodeRule, locals_: list[fx.Node], axes_of: dict, result_specs: list[P]) -> None:
        """Add an op with the local operands `locals_`, or the local program of its rule, and note its results."""
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        shapes = [
            local_shape(tuple(v.shape), spec, self.mesh) if isinstance(v, Tensor) else ()
            for v, spec in zip(values, result_specs, strict=True)
        ]
        remaining = iter(locals_)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: next(remaining))
        programs = programs_of(node)
        active = [factor for factor in programs if axes_of.get(factor)]
        program = fixed_program(node) or (programs[active[0]] if active else None)
        if program is not None:
            emit = Emit(self, rule, axes_of, [factor for factor in active if programs[factor] is programs[active[0]]])
            out = program(emit, *args, **kwargs)
            items = list(out) if isinstance(out, (tuple, list)) else [out]
            placed_results = [self.placed_result(item, spec, emit.axes) for item, spec in zip(items, result_specs, strict=True)]
        else:
            if rule.localise is not None:
                args, kwargs = rule.localise(args, kwargs, shapes)
            if has_rule(node):
                local = self.emit(node.target, self.laid_out(node, args), kwargs)
            else:  # not all of them can run without data; on global operands the shapes are those of the trace
                value = tree.map_leaves(_without_data, node.meta["val"])
                local = self.describe(self.graph.call_function(node.target, args, kwargs), value)
            if isinstance(node.meta["val"], (tuple, list)):
                local.meta["result_specs"] = result_specs
                items = [self.emit(operator.getitem, (local, i), {}) for i in range(len(values))]
            else:
                items = [local]
            placed_results = list(zip(items, result_specs, strict=True))
        if isinstance(node.meta["val"], (tuple, list)):
            self.tuples[node] = placed_results
        else:
            self.define(node, *placed_results[0])

    def laid_out(self, node: fx.Node, args: tuple) -> tuple:
        """`args` of an op, without gaps in memory where the op of torch refuses any: a shard along a minor dim has some."""
        if node.target not in WITHOUT_GAPS:
            return args
        how = {"memory_format": torch.contiguous_format}
        return fx.node.map_arg(args, lambda x: self.emit(torch.ops.aten.clone.default, (x,), how))

    def placed_result(self, item: fx.Node | Placed | Pending | None, spec: P, axes: tuple[str, ...]) -> tuple[fx.Node | None, P]:
        """A result of a primitive's local program: its local node and its spec.

        The program may state the spec itself (`Placed`); otherwise `spec`, which follows from the factors, counts. Over `axes`,
        which shard the factor that the program is for, the result is a pending sum only if the program says so (`Pending`).
        """
        if isinstance(item, Placed):
            return item.value, item.spec
        pending = isinstance(item, Pending)
        pending_axes = set(spec.partial) - set(axes) | (set(axes) if pending else set())
        return item.value if isinstance(item, Pending) else item, P(*spec.dims, partial=self.mesh.ordered(pending_axes))

    def note_fallback(self, node: fx.Node, rule: NodeRule) -> None:
        """Warn, once for each op of torch, if the op lets no dim be sharded, so that ranks must gather its sharded operands."""
        read = [self.specs[operand] for i, operand in enumerate(rule.operands) if i not in rule.as_is]
        gathered = any(spec.dims for spec in read) or (not has_rule(node) and any(spec.partial for spec in read))
        if gathered and primitive_of(node.target) is None and not rule.shardable and str(node.target) not in self.fallbacks:
            self.fallbacks.append(str(node.target))
            where = f" at {source_line(node)}" if source_line(node) else ""
            why = "has a sharding rule that lets no dim be sharded" if has_rule(node) else "has no sharding rule"
            warnings.warn(f"{node.target}{where} {why}: it is computed whole on every rank", ReplicatedFallback, 2)


def _without_data(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
