"""Bodies: the functions that control flow takes become graphs, and what they read from outside becomes operands of these graphs.

A body is traced by itself, with nothing of the surrounding trace active. Every tensor from outside that a call in it reads is
replaced by a stand-in, which becomes one more operand of the body: a captured one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import TraceError
from mpar.sharding._control import Scan
from mpar.sharding._control_op import Body, adopting, bind_flow, current_trace
from mpar.sharding._pass import erase_dead_nodes
from mpar.torch_private import (
    FakeTensorMode,
    TorchFunctionMode,
    apart_from_the_trace,
    functionalise,
    get_proxy_mode,
    outside_the_trace,
    traced_value,
    was_written,
)

__all__ = ["bind_scan", "share_captured", "slices", "trace_body"]


def trace_body(name: str, fn: Callable[..., Sequence[Tensor]], like: Sequence[Tensor]) -> tuple[Body, list[Tensor]]:
    """Trace `fn(*operands)` for operands that look like `like`; returns the body and the tensors from outside that it captures,
    which are its last operands."""
    shapes = [(tuple(x.shape), x.dtype) for x in like]
    lifts: list[_Lift] = []

    def flat(*operands: Tensor) -> list[Tensor]:
        lifts.append(_Lift(mode))
        token = adopting.set(lifts[-1].adopt)
        try:
            with lifts[-1] as lift:
                results = fn(*operands)
            return [lift.adopt(result) for result in results]
        finally:
            adopting.reset(token)

    with apart_from_the_trace(), torch.enable_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        module = current_trace().module_of(name, flat, [f"operand {i}" for i in range(len(fakes))], fakes)
        return _lifted(module, lifts[-1], len(fakes))


def _lifted(module: fx.GraphModule, lift: "_Lift", num_operands: int) -> tuple[Body, list[Tensor]]:
    """A traced module as a body: what it reads from outside, constants included, becomes placeholders."""
    graph = module.graph
    erase_dead_nodes(graph)
    placeholders, captured = graph.find_nodes(op="placeholder"), list[Tensor]()
    assert len(placeholders) == num_operands
    known: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        if id(constant) not in known:
            with graph.inserting_before(next(iter(graph.nodes))):
                new = known[id(constant)] = graph.placeholder(f"captured_{len(captured)}")
            new.meta["val"] = torch.empty(constant.shape, dtype=constant.dtype, device="meta")
            captured.append(lift.outside.get(id(constant), constant))
        node.replace_all_uses_with(known[id(constant)])
        graph.erase_node(node)
    for node in reversed([*placeholders, *known.values()]):
        next(iter(graph.nodes)).prepend(node)
    for node in graph.find_nodes(op="placeholder")[:num_operands]:
        node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")
    return Body(graph), captured


class _Lift(TorchFunctionMode):
    """Replaces tensors from outside of a body by stand-ins; `outside` has the tensor for each, by the identity of its value."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode, self.tracer = mode, get_proxy_mode().tracer
        self.outside: dict[int, Tensor] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []  # an identity is unique only as long as its object lives

    def adopt(self, x: object) -> object:
        """`x`, or the stand-in for it if it is a tensor from outside."""
        if not isinstance(x, Tensor) or (known := traced_value(x)) in self.tracer.tensor_tracker or id(known) in self.outside:
            return x
        if id(x) not in self.stand_ins:
            with outside_the_trace(), self.mode:
                value = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            self.stand_ins[id(x)] = functionalise(value)
            self.outside[id(value)] = x
            self.kept += [x, value]
        return self.stand_ins[id(x)]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree.map_leaves(self.adopt, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if any(was_written(x) for x in tree.leaves((args, kwargs)) if any(x is own for own in self.stand_ins.values())):
            name = getattr(func, "__name__", str(func))
            raise TraceError(
                f"{name} in a body of control flow writes into a tensor from outside of the body.\n"
                "Write into a copy (`.clone()`), or carry the tensor from turn to turn and return its new value."
            )
        return out


def slices(xs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without data that look like one slice of each of `xs` along dim 0."""
    with outside_the_trace():
        return [torch.empty(x.shape[1:], dtype=x.dtype, device="meta") for x in xs]


def share_captured(traced: Sequence[tuple[Body, list[Tensor]]], num_given: int) -> tuple[list[Body], list[Tensor]]:
    """Bodies that take the same operands: the first `num_given`, then what any of them captures. Returns them and the latter."""
    shared = list({id(x): x for _, captured in traced for x in captured}.values())
    bodies = []
    for body, captured in traced:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        placeholders = body.graph.find_nodes(op="placeholder")
        own = {id(x): node for x, node in zip(captured, placeholders[num_given:], strict=True)}
        for index, old in enumerate([*placeholders[:num_given], *(own.get(id(x)) for x in shared)]):
            new = graph.placeholder(f"operand_{index}")
            like = shared[index - num_given] if old is None else old.meta["val"]
            with outside_the_trace():
                new.meta["val"] = torch.empty(like.shape, dtype=like.dtype, device="meta")
            copies |= {} if old is None else {old: new}
        graph.output(graph.graph_copy(body.graph, copies))
        graph.output_node().meta = dict(body.graph.output_node().meta)
        bodies.append(Body(graph))
    return bodies, shared


def bind_scan(flow: Scan[Body], operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of a scan for tensors that are traced. The carries that enter each turn are kept beside: its gradient reads
    them. If nothing reads them in the end, they are taken out again."""
    if not flow.num_carries:
        return bind_flow(flow, operands)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    carries, ys, sums = flow.parts(graph.graph_copy(flow.body.graph, copies))
    entries = [copies[node] for node in flow.body.graph.find_nodes(op="placeholder")[: flow.num_carries]]
    graph.output((*carries, *ys, *entries, *sums))
    carries, ys, sums = flow.parts(bind_flow(replace(flow, body=Body(graph)), operands))
    return [*carries, *ys[: -flow.num_carries], *sums]
