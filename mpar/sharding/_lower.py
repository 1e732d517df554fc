"""Lower: a logical graph and the specs at its boundary become a rank graph, the same for every rank.

Forward over the nodes, each on its own: choose which factors are sharded, bring the operands there, run the local op. Every
node is lowered correctly whatever its operands' specs are, so the choice of specs decides speed and never the result.
"""

import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES, Marks, decode_axes, primitive_of
from mpar.sharding import _collectives as collectives
from mpar.sharding._canonicalise import labels_of, shape_of
from mpar.sharding._emit import Emit, Pending, Placed
from mpar.sharding._redistribute import plan, plan_bytes
from mpar.sharding._rules import NodeRule, has_rule, rule_of
from mpar.sharding._trace import LogicalGraph, source_line
from mpar.spec import P, check_spec, local_shape, normalise
from mpar.strategy import AxisTable, spec_from_axes

__all__ = ["RankGraph", "ReplicatedFallback", "lower"]

constrain_p, constrain_bwd_p = PRIMITIVES["constrain"], PRIMITIVES["constrain_bwd"]


class ReplicatedFallback(UserWarning):
    """An op is computed whole on every rank: it has no sharding rule, or its rule lets no dim of its operands be sharded."""


@dataclass(frozen=True)
class RankGraph:
    """A lowered function: local shapes, collectives, the same graph on every rank.

    Nodes carry `meta["val"]` (a local value without data), `meta["spec"]` and `meta["line"]`. `origin` maps the results of
    logical nodes to their first local node, `fallbacks` lists ops that are computed replicated.
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
    """Lower `logical` on `mesh`; an output spec of None leaves the result where it comes, pending sums included.

    hints: per result, where it would best come: a dim that no operand says anything about (the vocabulary in the gradient of an
           embedding) is computed sharded as the hint says, not whole.
    Raises ShardingError, listing all offenders, for specs that do not fit the shapes or name axes that the mesh has not.
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
    lowering.take_hints(hints)
    wanted = [None if spec is None else normalise(spec, mesh) for spec in out_specs or [None] * len(logical.results)]
    return lowering.run([normalise(spec, mesh) for spec in in_specs], wanted)


class _Lowering:
    def __init__(self, logical: LogicalGraph, mesh: Mesh, table: AxisTable) -> None:
        self.logical, self.mesh, self.table = logical, mesh, table
        self.graph = fx.Graph()
        self.placed: dict[fx.Node, dict[P, fx.Node]] = {}  # every placement that a logical value already has
        self.specs: dict[fx.Node, P] = {}  # the one that its op gave it
        self.tuples: dict[fx.Node, list[tuple[fx.Node, P]]] = {}
        self.marks: dict[int, P] = {}
        self.starts: dict[tuple, fx.Node] = {}
        self.fallbacks: list[str] = []
        self.hints: dict[fx.Node, P] = {}
        self.current: fx.Node | None = None

    def take_hints(self, hints: Sequence[P | None]) -> None:
        """Give each hint to the node that makes the result; element-wise ops pass it on to operands of the same shape."""
        todo = [(node, hint) for node, hint in zip(self.logical.results, hints, strict=False) if hint is not None]
        while todo:
            node, hint = todo.pop()
            if node in self.hints or node.op != "call_function":
                continue
            self.hints[node] = normalise(hint, self.mesh)
            if _may_grow(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
                todo.extend((used, hint) for used in node.all_input_nodes if shape_of(used) == shape_of(node))

    def run(self, in_specs: list[P], out_specs: list[P | None]) -> RankGraph:
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
                origin = {local: logical for logical, at in self.placed.items() for local in at.values()}
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
                self.call(node)
        raise AssertionError("graph without output")

    def placeholder(self, node: fx.Node, spec: P) -> fx.Node:
        value = node.meta["val"]
        local = self.graph.placeholder(node.name)
        shape = local_shape(shape_of(node), spec, self.mesh)
        local.meta = {
            "val": torch.empty(shape, dtype=value.dtype, device="meta"),
            "spec": spec,
            "line": "",
            "labels": labels_of(node),
        }
        return local

    def constant(self, node: fx.Node) -> fx.Node:
        local = self.graph.create_node("get_attr", node.target)
        value = self.logical.constants[node.target]
        local.meta = {"val": torch.empty(value.shape, dtype=value.dtype, device="meta"), "spec": P(), "line": "", "labels": ()}
        return local

    def output(self, node: fx.Node, spec: P | None) -> tuple[fx.Node, P]:
        self.current = node  # what moves it is on account of the op that made it
        spec = self.in_mesh_order(self.specs[node]) if spec is None else spec
        absent = self.mesh.ordered(set(spec.partial) - set().union(*(at.partial for at in self.placed[node])))
        if absent:
            raise ShardingError(
                f"result {self.logical.results.index(node)} {shape_of(node)} cannot be placed by {spec}: it is not a pending sum "
                f"over {list(absent)}, it is {self.specs[node]}.\nmesh: {self.mesh}. Leave `partial` out of its spec."
            )
        return self.redistribute(node, spec), spec

    def in_mesh_order(self, spec: P) -> P:
        """`spec` without axes that shard a dim in another order than the mesh has: within graphs they may, not between them."""
        dims = [next(d[:n] for n in range(len(d), -1, -1) if d[:n] == self.mesh.ordered(d[:n])) for d in spec.dims]
        return P(*dims, partial=spec.partial)

    def define(self, node: fx.Node, local: fx.Node, spec: P) -> None:
        expected = local_shape(shape_of(node), spec, self.mesh)
        assert tuple(local.meta["val"].shape) == expected, (
            f"{node.format_node()}: local {local.meta['val'].shape}, expected {expected}"
        )
        local.meta["spec"] = spec
        local.meta["labels"] = labels_of(node)
        self.placed[node] = {spec: local}
        self.specs[node] = spec

    def emit(self, target: Callable, args: Sequence[object], kwargs: Mapping[str, object], spec: P | None = None) -> fx.Node:
        """A local node, its value found by running the op without data."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        meta_args, meta_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if "device" in meta_kwargs:
            meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
        assert self.current is not None
        node.meta = {"val": target(*meta_args, **meta_kwargs), "spec": spec, "line": source_line(self.current), "labels": ()}
        return node

    def start(self, axes: tuple[str, ...], extent: int) -> fx.Node | int:
        """The first global index on this rank of a factor with `extent` local elements."""
        if not axes:
            return 0
        if (axes, extent) not in self.starts:
            self.starts[axes, extent] = self.emit(collectives.start, (), {"axes": axes, "extent": extent})
        return self.starts[axes, extent]

    def redistribute(self, node: fx.Node, target: P) -> fx.Node:
        """The local node of `node` placed by `target`: an existing one, or made from the one from which it is cheapest."""
        at = self.placed[node]
        if target in at:
            return at[target]
        shape = shape_of(node)
        nbytes = node.meta["val"].nbytes
        candidates = [
            (plan_bytes(moves, nbytes, self.mesh), len(moves), index, spec, moves)
            for index, spec in enumerate(at)
            if set(target.partial) <= set(spec.partial)
            for moves in [plan(spec, target, len(shape), self.mesh)]
        ]
        *_, spec, moves = min(candidates, key=lambda c: c[:3])
        local = at[spec]
        for move in moves:
            size = self.mesh.axis_size(move.axes)
            kwargs: dict[str, Any] = {"axes": move.axes, "size": size}
            if move.kind == "all_reduce":
                kwargs["op"] = "sum"
            elif move.kind == "all_to_all":
                kwargs |= {"src": move.dim, "dst": move.dst}
            else:
                kwargs["dim"] = move.dim
            local = self.emit(getattr(collectives, move.kind), (local,), kwargs, move.after)
            local.meta["labels"] = labels_of(node)
            at.setdefault(move.after, local)
        return local

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.tuples:
            local, spec = self.tuples[node.args[0]][node.args[1]]
            self.define(node, local, spec)
        elif node.target == constrain_p.op:
            self.constrain(node)
        elif node.target == constrain_bwd_p.op:
            self.constrain_backward(node)
        else:
            self.apply(node)

    def constrain(self, node: fx.Node) -> None:
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
        """The spec that these logical axes ask of a value; `...` leaves a dim, and pending sums, to what nothing else takes."""
        spec = self.in_words(axes)
        if ... not in axes:
            return spec
        now = self.specs[source]
        dims = []
        for index, axis in enumerate(axes):
            here = now.dim(index)
            stays = next((n for n, at in enumerate(here) if at in spec.axes), len(here))  # what is minor to it goes, too
            dims.append(here[:stays] if axis is ... else spec.dim(index))
        return P(*dims, partial=tuple(axis for axis in now.partial if axis not in spec.axes))

    def in_words(self, axes: Marks) -> P:
        return spec_from_axes([None if axis is ... else axis for axis in axes], self.table, self.mesh)

    def constrain_backward(self, node: fx.Node) -> None:
        source, cotangent = self.marks[node.kwargs["mark"]], node.args[0]
        now = self.specs[cotangent]
        rank = len(shape_of(cotangent))
        decided = source.axes
        dims = []
        for dim in range(rank):
            free = tuple(axis for axis in now.dim(dim) if axis not in decided)
            dims.append(self.mesh.ordered({*source.dim(dim), *free}) if free else source.dim(dim))
        spec = P(*dims, partial=tuple(axis for axis in now.partial if axis not in decided))
        local = self.redistribute(cotangent, spec)
        self.alias(node, cotangent, local, spec)

    def alias(self, node: fx.Node, source: fx.Node, local: fx.Node, spec: P) -> None:
        """`node` is the value of `source` at `spec`; both share every placement from now on."""
        self.placed[node] = self.placed[source]
        self.specs[node] = spec
        local.meta["labels"] = (*local.meta["labels"], *labels_of(node))

    def apply(self, node: fx.Node) -> None:
        rule = rule_of(node)
        self.note_fallback(node, rule)
        specs = [self.specs[operand] for operand in rule.operands]
        axes_of = self.choose(rule, specs)
        self.follow_hints(node, rule, specs, axes_of)
        passed = self.pass_partial(node, rule, specs, axes_of)
        locals_ = []
        for i, (operand, spec, dims) in enumerate(zip(rule.operands, specs, rule.factors, strict=True)):
            if i in rule.as_is:
                stays = (() if rule.replicate & set(names) else spec.dim(dim) for dim, names in enumerate(dims))
                target = P(*stays, partial=spec.partial)
            else:
                target = P(*self.dims_of(dims, axes_of), partial=self.mesh.ordered(set(spec.partial) & passed))
            locals_.append(self.redistribute(operand, target))
        result_specs = []
        for dims in rule.results:  # a factor that this result has not was summed over
            here = self.dims_of(dims, axes_of)
            kept = {axis for axes in here for axis in axes}
            summed = {axis for factor, axes in axes_of.items() if not _appears(factor, dims) for axis in axes} - kept
            result_specs.append(P(*here, partial=self.mesh.ordered(summed | passed)))
        self.finish(node, rule, locals_, axes_of, result_specs)

    def finish(self, node: fx.Node, rule: NodeRule, locals_: list[fx.Node], axes_of: dict, result_specs: list[P]) -> None:
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        shapes = [
            local_shape(tuple(v.shape), spec, self.mesh) if isinstance(v, Tensor) else ()
            for v, spec in zip(values, result_specs, strict=True)
        ]
        remaining = iter(locals_)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: next(remaining))
        primitive = primitive_of(node.target)
        active = [factor for factor in (primitive.placement.sharded if primitive else ()) if axes_of.get(factor)]
        if primitive is not None and (active or primitive.placement.lowered is not None):
            emit = Emit(self, rule, axes_of, active[0] if active else "")
            out = (primitive.placement.lowered or primitive.placement.sharded[active[0]])(emit, *args, **kwargs)
            given = list(out) if isinstance(out, (tuple, list)) else [out]
            pieces = [self.piece(item, spec, emit.axes) for item, spec in zip(given, result_specs, strict=True)]
        else:
            if rule.localise is not None:
                args, kwargs = rule.localise(args, kwargs, shapes)
            local = self.emit(node.target, args, kwargs)
            if isinstance(node.meta["val"], (tuple, list)):
                parts = [self.emit(operator.getitem, (local, i), {}) for i in range(len(values))]
            else:
                parts = [local]
            pieces = list(zip(parts, result_specs, strict=True))
        if isinstance(node.meta["val"], (tuple, list)):
            self.tuples[node] = pieces
        else:
            self.define(node, *pieces[0])

    def piece(self, item: fx.Node | Placed | Pending, spec: P, axes: tuple[str, ...]) -> tuple[fx.Node, P]:
        """A result of a local program and where it is: where it says, else by its factors; a sum over `axes` if it says so."""
        if isinstance(item, Placed):
            return item.value, item.spec
        pending = isinstance(item, Pending)
        kept = set(spec.partial) - set(axes) | (set(axes) if pending else set())
        return item.value if pending else item, P(*spec.dims, partial=self.mesh.ordered(kept))

    def choose(self, rule: NodeRule, specs: list[P]) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each factor: operands that stay or lead come first, then the wish of the larger shard, then order.

        A shard is gathered over an axis by messages of its own size: where two operands want the axis, the smaller one moves.
        """
        axes_of: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        local_bytes = [
            x.meta["val"].nbytes / self.mesh.axis_size(tuple(axis for dim in spec.dims for axis in dim))
            for x, spec in zip(rule.operands, specs, strict=True)
        ]
        order = sorted(range(len(specs)), key=lambda i: (i not in rule.as_is, i not in rule.leads, -local_bytes[i], i))
        whole = {*rule.replicate, *rule.follows}
        whole |= {name for name, i in rule.ragged.items() if not specs[i].axes}
        for i in rule.as_is:  # what stays whole keeps its factors whole in all operands
            whole |= {name for dim, names in enumerate(rule.factors[i]) for name in names if not specs[i].dim(dim)}
        for i in order:
            for dim, names in enumerate(rule.factors[i]):
                remaining = list(specs[i].dim(dim))
                for name in names:
                    taken: tuple[str, ...] = ()
                    while remaining and name not in whole:
                        wider = (*taken, remaining[0])
                        if remaining[0] in used and axes_of.get(name, ())[: len(wider)] != wider:
                            break
                        if rule.sizes[name] % self.mesh.axis_size(wider):
                            break
                        taken = wider
                        remaining.pop(0)
                    if name not in axes_of and taken:
                        axes_of[name] = taken
                        used.update(taken)
                    if taken != axes_of.get(name, ()) or self.mesh.axis_size(taken) != rule.sizes[name]:
                        break  # minor factors stay whole: the shard of this dim would not be contiguous
        for name, leader in rule.follows.items():
            axes = self.followed(name, rule, specs)
            if axes and set(axes) <= set(axes_of.get(leader, ())):
                axes_of[name] = axes
        return self.contiguous(rule, axes_of)

    def followed(self, name: str, rule: NodeRule, specs: list[P]) -> tuple[str, ...]:
        """The axes by which an operand with the following factor `name` is sharded along it: one taken as it is, or the first."""
        order = sorted(range(len(specs)), key=lambda i: (i not in rule.as_is, i))
        return next((specs[i].dim(rule.factors[i].index((name,))) for i in order if (name,) in rule.factors[i]), ())

    def contiguous(self, rule: NodeRule, axes_of: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """`axes_of` without factors whose shards would not be contiguous in some dim: one that is major there stays whole."""
        for names in (names for dims in (*rule.factors, *rule.results) for names in dims):
            for major, minor in itertools.pairwise(names):
                if minor in axes_of and self.mesh.axis_size(axes_of.get(major, ())) != rule.sizes[major]:
                    return self.contiguous(rule, {name: axes for name, axes in axes_of.items() if name != minor})
        return axes_of

    def follow_hints(self, node: fx.Node, rule: NodeRule, specs: list[P], axes_of: dict[str, tuple[str, ...]]) -> None:
        """Shard factors that only results have as their hints say, over axes that nothing else of the op uses."""
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
        """Where a result would best come: what was asked for, or where a mark on it places it."""
        for user in node.users if node not in self.hints else ():
            if user.target == constrain_p.op:
                axes = decode_axes(user.kwargs["axes"])
                return normalise(axes, self.mesh) if isinstance(axes, P) else self.in_words(axes)
            if user.target == constrain_bwd_p.op:
                return self.marks[user.kwargs["mark"]]
        return self.hints.get(node)

    def pass_partial(self, node: fx.Node, rule: NodeRule, specs: list[P], axes_of: dict[str, tuple[str, ...]]) -> set[str]:
        """The pending sums of operands that the op may leave pending: it is linear in them, and nothing grows."""
        used = {axis for axes in axes_of.values() for axis in axes}
        pending = [set(spec.partial) for spec in specs]
        if rule.jointly:
            return set.intersection(*pending) - used if pending else set()
        out_bytes = sum(v.nbytes for v in _tensors(node.meta["val"]))
        passed = set()
        for i in rule.linear:
            alone = pending[i] - used - set().union(*(p for j, p in enumerate(pending) if j != i))
            if out_bytes <= rule.operands[i].meta["val"].nbytes or _may_grow(node):
                passed |= alone
        return passed

    def dims_of(self, dims: tuple[tuple[str, ...], ...], axes_of: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
        out = []
        for names in dims:
            axes: tuple[str, ...] = ()
            for name in names:
                axes = (*axes, *axes_of.get(name, ()))
            out.append(axes)
        return out

    def note_fallback(self, node: fx.Node, rule: NodeRule) -> None:
        """Warn, once an op, if an op of torch of which no part can be computed alone makes ranks gather its operands."""
        read = [self.specs[operand] for i, operand in enumerate(rule.operands) if i not in rule.as_is]
        gathered = any(spec.dims for spec in read) or (not has_rule(node) and any(spec.partial for spec in read))
        if gathered and primitive_of(node.target) is None and not rule.shardable and str(node.target) not in self.fallbacks:
            self.fallbacks.append(str(node.target))
            where = f" at {source_line(node)}" if source_line(node) else ""
            why = "works across every dim" if has_rule(node) else "has no sharding rule"
            warnings.warn(f"{node.target}{where} {why}: it is computed whole on every rank", ReplicatedFallback, 2)


def _may_grow(node: fx.Node) -> bool:
    """Whether a pending sum passes through an op although its result has more bytes."""
    primitive = primitive_of(node.target)
    return primitive is not None and primitive.placement.may_grow_pending


def _appears(factor: str, dims: tuple[tuple[str, ...], ...]) -> bool:
    return any(factor in names for names in dims)


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in tree.leaves(value) if isinstance(v, Tensor)]
