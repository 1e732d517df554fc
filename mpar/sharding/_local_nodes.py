"""The local nodes of a lowering: which of them hold the value of a logical node, at which specs, and how it moves to others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mpar.mesh import Mesh
from mpar.sharding import _collectives as collectives
from mpar.sharding._canonicalise import labels_of, shape_of
from mpar.sharding._redistribute import Move, plan, plan_bytes
from mpar.sharding._trace import LogicalGraph, source_line
from mpar.spec import P, local_shape

__all__ = ["LocalNodes"]


class LocalNodes:
    """The graph on local shapes, as far as it has been made. `current` is the logical node that is being lowered: new local nodes
    get its source line.
    """

    def __init__(self, logical: LogicalGraph, mesh: Mesh) -> None:
        self.logical, self.mesh = logical, mesh
        self.graph = fx.Graph()
        self.placed: dict[fx.Node, dict[P, fx.Node]] = {}  # logical node -> spec -> the local node that holds it at that spec
        self.specs: dict[fx.Node, P] = {}  # logical node -> the spec that its op, or a mark on it, gave it
        self.current: fx.Node | None = None

    def placeholder(self, node: fx.Node, spec: P) -> fx.Node:
        """The local input that holds the shard of a global input."""
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
        """The local node of a constant, which is replicated."""
        local = self.graph.create_node("get_attr", node.target)
        value = self.logical.constants[node.target]
        local.meta = {"val": torch.empty(value.shape, dtype=value.dtype, device="meta"), "spec": P(), "line": "", "labels": ()}
        return local

    def define(self, node: fx.Node, local: fx.Node, spec: P) -> None:
        """Note that `local` holds the value of the logical `node` at `spec`."""
        expected = local_shape(shape_of(node), spec, self.mesh)
        assert tuple(local.meta["val"].shape) == expected, (
            f"{node.format_node()}: local {local.meta['val'].shape}, expected {expected}"
        )
        local.meta["spec"] = spec
        local.meta["labels"] = labels_of(node)
        self.placed[node] = {spec: local}
        self.specs[node] = spec

    def alias(self, node: fx.Node, source: fx.Node, local: fx.Node, spec: P) -> None:
        """Note that `node` has the value of `source`, which `local` holds at `spec`. Both then share their local nodes."""
        self.placed[node] = self.placed[source]
        self.specs[node] = spec
        local.meta["labels"] = (*local.meta["labels"], *labels_of(node))

    def emit(self, target: Callable, args: Sequence[object], kwargs: Mapping[str, object], spec: P | None = None) -> fx.Node:
        """Add a local node; the shape of its value is found by running the op without data."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        meta_args, meta_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if "device" in meta_kwargs:
            meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
        return self.describe(node, target(*meta_args, **meta_kwargs), spec)

    def describe(self, node: fx.Node, value: object, spec: P | None = None) -> fx.Node:
        """Note the value, the spec and the source line of a new local node."""
        assert self.current is not None
        node.meta = {"val": value, "spec": spec, "line": source_line(self.current), "labels": ()}
        return node

    def start(self, axes: tuple[str, ...], extent: int) -> fx.Node | int:
        """The global index of this rank's first element of a factor that is sharded by `axes` and has `extent` elements here."""
        if not axes:
            return 0
        kwargs = {"axes": axes, "extent": extent}
        known = (node for node in self.graph.find_nodes(op="call_function", target=collectives.start) if node.kwargs == kwargs)
        return next(known, None) or self.emit(collectives.start, (), kwargs)

    def redistribute(self, node: fx.Node, target: P) -> fx.Node:
        """The local node that holds `node` at the spec `target`.

        If there is none yet, the one that is cheapest to move there is moved; each spec on the way is noted as well.
        """
        local_nodes = self.placed[node]
        if target in local_nodes:
            return local_nodes[target]
        _, spec, moves = self.cheapest(node, target)
        local = local_nodes[spec]
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
            local_nodes.setdefault(move.after, local)
        return local

    def cheapest(self, node: fx.Node, target: P) -> tuple[int, P, list[Move]]:
        """The cheapest way to the spec `target`: the bytes that a rank receives, the spec where it begins, and the moves."""
        shape, nbytes = shape_of(node), node.meta["val"].nbytes
        ways = [
            (plan_bytes(moves, nbytes, self.mesh), len(moves), index, spec, moves)
            for index, spec in enumerate(self.placed[node])
            if set(target.partial) <= set(spec.partial)
            for moves in [plan(spec, target, len(shape), self.mesh)]
        ]
        received, _, _, spec, moves = min(ways, key=lambda way: way[:3])
        return received, spec, moves
