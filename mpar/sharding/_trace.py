"""Trace: a pure function of tensors becomes a logical graph, an FX graph of global shapes without data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import TraceError
from mpar.ops import marking
from mpar.sharding import _control_rules  # noqa: F401  it fills a table
from mpar.sharding._canonical import canonicalise
from mpar.sharding._control_op import tracing
from mpar.sharding._control_settle import settle
from mpar.sharding._early_functions import early_functions_called
from mpar.sharding._pass import erase_dead_nodes
from mpar.sharding._refuse import explain, impure
from mpar.sharding._watch import Calls, Watch
from mpar.sharding._writes import replace_writes
from mpar.torch_private import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensorMode,
    checkpoint_disabled,
    control_flow_called,
    defunctionalise,
    flex_attention_called,
    functionalise,
    make_fx,
    original_views,
    preserve_node_meta,
    quiet_errors,
)

__all__ = ["LogicalGraph", "source_line", "trace"]


@dataclass(frozen=True)
class LogicalGraph:
    """A traced function.

    graph:     its placeholders are the tensor leaves of the arguments, in order; its output is a flat tuple of the results.
    names:     the path of each leaf in the tuple of arguments, for messages.
    constants: tensors that the function made from Python numbers; their nodes are `get_attr`.
    inputs:    the structure of the tuple of arguments.
    outputs:   the structure of what the function returns.
    """

    graph: fx.Graph
    names: tuple[str, ...]
    constants: dict[str, Tensor]
    inputs: tree.Structure
    outputs: tree.Structure

    @property
    def placeholders(self) -> list[fx.Node]:
        """The input nodes in order."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the function returns, flat, in order."""
        return list(self.graph.output_node().args[0])

    def __str__(self) -> str:
        return "\n".join(describe(node) for node in self.graph.nodes)


def trace(fn: Callable[..., object], args: Sequence[object], *, canonical: bool = True) -> LogicalGraph:
    """Trace `fn(*args)`. The leaves of `args` are real, meta or fake tensors; only their shapes and dtypes are read.

    canonical: whether the passes of `canonicalise` run on the graph.

    Raises TraceError, listing all offenders with their lines, for randomness, mutation, or shapes that depend on data.
    """
    leaves, structure = tree.flatten_present(tuple(args))
    names = tuple(path for path, leaf in tree.leaves_with_path(tuple(args)) if leaf is not None)
    foreign = [name for name, leaf in zip(names, leaves, strict=True) if not _is_dense(leaf)]
    if foreign:
        raise TraceError(
            f"cannot trace {_name(fn)}: arguments {foreign} are not tensors, or are sparse ones.\n"
            "Make them tensors, close over them (functools.partial), or name their parameters in `static=` of jit."
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in leaves]
    out_structure: list[tree.Structure] = []

    def flat(*flat_args: Tensor) -> list[Tensor]:
        out, out_spec = tree.flatten_present(fn(*tree.unflatten(structure, flat_args)))
        out_structure.append(out_spec)
        strange = [type(value).__name__ for value in out if not isinstance(value, (Tensor, int, float, complex))]
        if strange:
            raise TraceError(f"cannot trace {_name(fn)}: it returns {strange}; a compiled function returns tensors and numbers")
        with mode:
            return [value if isinstance(value, Tensor) else torch.tensor(value) for value in out]

    with tracing(_trace_flat) as opened:
        module = _trace_flat(_name(fn), flat, names, fakes)
    graph = module.graph
    erase_dead_nodes(graph)
    constants = {}
    for node in graph.find_nodes(op="get_attr"):
        constants[node.target] = getattr(module, node.target)
        node.meta.setdefault("val", torch.empty_like(constants[node.target], device="meta"))
    without_data = [node for node in graph.find_nodes(op="get_attr") if isinstance(constants[node.target], FakeTensor)]
    if without_data:
        lines = sorted({source_line(user) for node in without_data for user in node.users})
        raise TraceError(
            f"cannot trace {_name(fn)}: another trace inside it made tensors without data, which {', '.join(lines)} uses.\n"
            "Leave make_fx and torch.func.linearize out: use torch.func.jvp, or call the function."
        )
    prepare = _prepare_canonical if canonical else replace_writes
    prepare(graph)
    settle(graph, opened.flows, prepare, _body)
    return LogicalGraph(graph, names, constants, structure, out_structure[0])


def _prepare_canonical(graph: fx.Graph) -> None:
    replace_writes(graph)
    canonicalise(graph)


def _body(graph: fx.Graph) -> LogicalGraph:
    """The graph of a body of control flow, of which nothing remains to be traced."""
    names = tuple(node.name for node in graph.find_nodes(op="placeholder"))
    results = graph.output_node().args[0]
    return LogicalGraph(graph, names, {}, tree.flatten(names)[1], tree.flatten(results)[1])


def _trace_flat(name: str, flat: Callable, names: Sequence[str], fakes: list[Tensor]) -> fx.GraphModule:
    """The graph of `flat`, without writes. Raises TraceError, for the function `name`, if it cannot be traced."""
    watch = Watch()

    def functional(*flat_args: Tensor) -> list[Tensor]:
        with watch, FunctionalTensorMode():
            copies = [functionalise(x) for x in flat_args]
            with Calls(watch, names, copies) as calls:
                results = flat(*copies)
            calls.refuse_written("the function")
            return [defunctionalise(x) for x in results]

    try:
        with (
            marking(),
            preserve_node_meta(),
            original_views(),
            checkpoint_disabled(),
            flex_attention_called(),
            control_flow_called(),
            early_functions_called(),
            quiet_errors(),
        ):
            module = make_fx(functional)(*fakes)
    except Exception as error:
        refusal = explain(name, watch, error)
        if refusal is error:
            raise
        raise refusal from error
    if watch.offenders:
        raise impure(name, watch)
    return module


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's or the model's code that made `node`; of a gradient, the line of its forward op."""
    return node.meta.get("stack_trace") or ""


def describe(node: fx.Node) -> str:
    """One line for one node of a logical graph."""
    value = node.meta.get("val")
    shape = f"{_dtype(value)}{list(value.shape)}" if isinstance(value, Tensor) else ""
    target = node.op if node.op != "call_function" else node.target
    return f"%{node.name}: {shape} = {target}{node.args} {node.kwargs or ''}".rstrip()


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
