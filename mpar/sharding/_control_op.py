"""The op that stands for control flow while a function is traced, with a derivative and a batching rule for each kind of flow.

`mpar::control` takes the operands of a flow and a key, by which the open trace knows the flow and its bodies. Transforms of
`torch.func` see an `autograd.Function`, whose rules (`_control_rules.py`) make the bodies of other flows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx

from mpar.ops import primitive_of
from mpar.sharding._control import Flow, values_of

__all__ = [
    "RULES",
    "Body",
    "FlowRules",
    "Trace",
    "adopting",
    "bind_flow",
    "control_op",
    "current_trace",
    "interpret",
    "replayed_line",
    "tracing",
]


@dataclass(frozen=True, eq=False)
class Body:
    """A traced body: its placeholders are its operands, its output is the tuple of its results."""

    graph: fx.Graph

    @property
    def operands(self) -> list[Tensor]:
        """Tensors without data that look like its operands."""
        return [node.meta["val"] for node in self.graph.find_nodes(op="placeholder")]

    @property
    def results(self) -> list[Tensor]:
        """Tensors without data that look like its results."""
        return [node.meta["val"] for node in self.graph.output_node().args[0]]


@dataclass
class Trace:
    """What one trace, and those of bodies inside it, have in common.

    module_of: (name, function of tensors, names, tensors without data) -> the traced module.
    flows:     the control flow met so far, by the key that stands for it while the trace lasts.
    """

    module_of: Callable[[str, Callable, Sequence[str], list[Tensor]], fx.GraphModule]
    flows: dict[str, Flow[Body]] = field(default_factory=dict)


_trace: ContextVar[Trace | None] = ContextVar("mpar_control_trace", default=None)
adopting: ContextVar[Callable[[object], object] | None] = ContextVar("mpar_adopting", default=None)
"""While a body is traced: what it reads in the place of a tensor from outside."""
replayed_line: ContextVar[str] = ContextVar("mpar_replayed_line", default="")
"""While a graph is run again to be traced: the source line of the node that runs."""


@contextmanager
def tracing(module_of: Callable[..., fx.GraphModule]) -> Iterator[Trace]:
    """While this is open control flow may be traced; inside of another trace it is that one's."""
    trace = _trace.get() or Trace(module_of)
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)


def current_trace() -> Trace:
    """The trace that is open."""
    trace = _trace.get()
    assert trace is not None, "control flow is traced outside of a trace"
    return trace


@dataclass(frozen=True)
class FlowRules:
    """How transforms treat a kind of flow. All take the flow and its operands.

    pull_back:    and a cotangent or None for each result, and which operands need a gradient; returns these, else None.
    push_forward: and a tangent or None for each operand; returns the tangents of the results.
    batch:        the size of the batch and the batched dim of each operand, or None, come first; returns results and their dims.
    """

    pull_back: Callable[..., list[Tensor | None]]
    push_forward: Callable[..., list[Tensor | None]]
    batch: Callable[..., tuple[list[Tensor], list[int]]]


Batched = tuple[tuple[Tensor, ...], tuple[int, ...]]
RULES: dict[type, FlowRules] = {}
_LIBRARY = torch.library.Library("mpar", "FRAGMENT")
_LIBRARY.define("control(Tensor[] operands, *, str flow) -> Tensor[]")
control_op = torch.ops.mpar.control.default


def _without_data(operands: list[Tensor], *, flow: str) -> list[Tensor]:
    return list(values_of(current_trace().flows[flow], operands))


_LIBRARY.impl("control", _without_data, "CompositeExplicitAutograd")
torch.library.register_fake("mpar::control", _without_data, lib=_LIBRARY)


def bind_flow(flow: Flow[Body], operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of a flow for tensors that are traced. In a body, tensors from outside of it are among them."""
    adopt = adopting.get()
    return list(_Control.apply(flow, *(operands if adopt is None else map(adopt, operands))))


class _Kept(FunctionCtx):
    """What a call keeps for its derivatives."""

    flow: Flow[Body]
    num_operands: int
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _BatchInfo:
    """What torch tells a batching rule."""

    batch_size: int


class _Control(torch.autograd.Function):
    """The autograd Function around `mpar::control`. Its arguments are the flow and its operands."""

    @staticmethod
    def forward(flow: Flow[Body], *operands: Tensor) -> tuple[Tensor, ...]:
        flows = current_trace().flows
        key = next((key for key, known in flows.items() if known is flow), None) or f"flow{len(flows)}"
        flows[key] = flow
        return tuple(control_op(list(operands), flow=key))

    @staticmethod
    def setup_context(ctx: _Kept, inputs: tuple[Flow[Body] | Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.flow = inputs[0]  # type: ignore[assignment]
        operands: tuple[Tensor, ...] = inputs[1:]  # type: ignore[assignment]
        ctx.num_operands = len(operands)
        ctx.save_for_backward(*operands, *output)
        ctx.save_for_forward(*operands, *output)
        ctx.mark_non_differentiable(*(x for x in output if not (x.is_floating_point() or x.is_complex())))

    @staticmethod
    def backward(ctx: _Kept, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        operands, results = ctx.saved_tensors[: ctx.num_operands], ctx.saved_tensors[ctx.num_operands :]
        needed = ctx.needs_input_grad[1:]
        if all(dy is None for dy in cotangents):
            return None, *(None for _ in operands)
        return None, *RULES[type(ctx.flow)].pull_back(ctx.flow, operands, results, cotangents, needed)

    @staticmethod
    def jvp(ctx: _Kept, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = [torch.autograd.forward_ad.unpack_dual(kept)[0] for kept in ctx.saved_tensors]
        return tuple(RULES[type(ctx.flow)].push_forward(ctx.flow, saved[: ctx.num_operands], tangents))

    @staticmethod
    def vmap(info: _BatchInfo, in_dims: tuple[int | None, ...], flow: Flow[Body], *operands: Tensor) -> Batched:
        results, dims = RULES[type(flow)].batch(info.batch_size, in_dims[1:], flow, operands)
        return tuple(results), tuple(dims)


def interpret(body: Body, *operands: Tensor) -> list[Tensor]:
    """Run a body on tensors that may be traced and transformed; primitives and control flow in it keep their derivatives."""
    given = iter(operands)
    env: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "output":
            return list(args[0])
        else:
            token = replayed_line.set(node.meta.get("stack_trace") or "")
            try:
                env[node] = _call(node.target, args, kwargs)
            finally:
                replayed_line.reset(token)
    raise AssertionError("body without output")


def _call(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if target == control_op:
        return bind_flow(current_trace().flows[kwargs["flow"]], args[0])
    primitive = primitive_of(target)
    return target(*args, **kwargs) if primitive is None else primitive.bind(*args, **kwargs)
