"""Trace: a pure function of tensors becomes a logical graph, an FX graph of global shapes without data."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import TraceError
from mpar.ops._constrain import marking
from mpar.sharding._canonicalise import canonicalise
from mpar.sharding._torch_private import FakeTensor, FakeTensorMode, make_fx

__all__ = ["LogicalGraph", "source_line", "trace", "value_of"]

_HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class LogicalGraph:
    """A traced function. Placeholders are the tensor leaves of its arguments in order; the output node holds a flat tuple.

    names:     the path of each leaf in the tuple of arguments, for messages.
    constants: tensors that the function made from Python numbers; their nodes are `get_attr`.
    outputs:   structure of what the function returns.
    """

    graph: fx.Graph
    names: tuple[str, ...]
    constants: dict[str, Tensor]
    inputs: Any
    outputs: Any

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


def trace(fn: Callable[..., Any], args: Sequence[Any], *, canonical: bool = True) -> LogicalGraph:
    """Trace `fn(*args)`; the leaves of `args` are real, meta or fake tensors, of which only shapes and dtypes are read.

    Raises TraceError, listing all offenders with their lines, for randomness, mutation, or shapes that depend on data.
    """
    leaves, structure = tree.flatten(tuple(args))
    foreign = [path for path, leaf in tree.leaves_with_path(tuple(args)) if not isinstance(leaf, Tensor)]
    if foreign:
        raise TraceError(
            f"cannot trace {_name(fn)}: arguments {foreign} are not tensors.\n"
            "Close over static values (functools.partial) or make them tensors."
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in leaves]
    out_structure: list[Any] = []

    def flat(*flat_args: Tensor) -> list[Tensor]:
        out, out_spec = tree.flatten(fn(*tree.unflatten(structure, flat_args)))
        out_structure.append(out_spec)
        with mode:
            return [value if isinstance(value, Tensor) else torch.tensor(value) for value in out]

    with marking():
        module = _trace_flat(fn, flat, fakes)
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    constants = {}
    for node in graph.find_nodes(op="get_attr"):
        constants[node.target] = getattr(module, node.target)
        node.meta.setdefault("val", torch.empty_like(constants[node.target], device="meta"))
    _refuse_impure(fn, graph)
    if canonical:
        canonicalise(graph)
    names = tuple(tree.paths(tuple(args)))
    return LogicalGraph(graph, names, constants, structure, out_structure[0])


def _trace_flat(fn: Callable, flat: Callable, fakes: list[Tensor]) -> fx.GraphModule:
    try:
        return make_fx(flat, record_stack_traces=True)(*fakes)
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise TraceError(
            f"cannot trace {_name(fn)}: {error.func} makes a Python value or a shape from the data of a tensor.\n"
            "Use torch.where and fixed shapes, or compute the value outside and close over it."
        ) from error
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        raise TraceError(
            f"cannot trace {_name(fn)}: the result of {error.func} has a shape that depends on data.\n"
            "Use masks and fixed shapes (torch.where) instead."
        ) from error


def value_of(node: fx.Node) -> Any:
    """The value without data that `node` stands for: a tensor, or a tuple of tensors."""
    return node.meta["val"]


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's or the model's code that made `node`, or "" where torch kept none (backward nodes)."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        path = Path(file)
        if "/torch/" in file or (_HERE in path.parents and path.parent.name in ("ops", "sharding", "program")):
            continue
        return f"{path.parent.name}/{path.name}:{line}"
    return ""


def describe(node: fx.Node) -> str:
    """One line for one node of a logical graph."""
    value = node.meta.get("val")
    shape = f"{_dtype(value)}{list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"%{node.name}: {shape} = {node.op if node.op != 'call_function' else node.target}{node.args} {node.kwargs or ''}".rstrip()


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _refuse_impure(fn: Callable, graph: fx.Graph) -> None:
    offenders = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not hasattr(node.target, "_schema"):
            continue
        where = f" at {source_line(node)}" if source_line(node) else ""
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            offenders.append(
                f"{node.target}{where} draws from torch's generator: use mpar.ops.random_uniform or dropout, with a key"
            )
        elif node.target._schema.is_mutable:
            offenders.append(f"{node.target}{where} writes into a tensor: use the op without the trailing underscore")
        elif isinstance(node.meta.get("val"), FakeTensor) and any(not isinstance(s, int) for s in node.meta["val"].shape):
            offenders.append(f"{node.target}{where} gives a shape that depends on data: use masks and fixed shapes")
    if offenders:
        raise TraceError(f"cannot compile {_name(fn)}, it is not a pure function of static shapes:\n  " + "\n  ".join(offenders))
