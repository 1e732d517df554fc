"""Trace: a pure function of tensors becomes a logical graph, an FX graph of global shapes without data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mpar import tree
from mpar.errors import TraceError
from mpar.ops import marking
from mpar.sharding._canonical import canonicalise
from mpar.sharding._pass import erase_dead_nodes
from mpar.sharding._watch import Calls, Watch, functional_form
from mpar.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    make_fx,
    preserve_node_meta,
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


def trace(fn: Callable[..., object], args: Sequence[object], *, canonical: bool = True) -> LogicalGraph:
    """Trace `fn(*args)`. The leaves of `args` are real, meta or fake tensors; only their shapes and dtypes are read.

    canonical: whether the passes of `canonicalise` run on the graph.

    Raises TraceError, listing all offenders with their lines, for randomness, mutation, or shapes that depend on data.
    """
    all_leaves, structure = tree.flatten(tuple(args))
    leaves = [leaf for leaf in all_leaves if leaf is not None]  # None is part of the structure, not an input
    named = [(path, leaf) for path, leaf in tree.leaves_with_path(tuple(args)) if leaf is not None]
    foreign = [path for path, leaf in named if not isinstance(leaf, Tensor)]
    if foreign:
        raise TraceError(
            f"cannot trace {_name(fn)}: arguments {foreign} are not tensors.\n"
            "Close over static values (functools.partial) or make them tensors."
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in leaves]
    out_structure: list[Any] = []

    def flat(*flat_args: Tensor) -> list[Tensor]:
        given = iter(flat_args)
        full = [leaf if leaf is None else next(given) for leaf in all_leaves]
        out, out_spec = tree.flatten(fn(*tree.unflatten(structure, full)))
        out_structure.append(out_spec)
        strange = [type(value).__name__ for value in out if not isinstance(value, (Tensor, int, float))]
        if strange:
            raise TraceError(f"cannot trace {_name(fn)}: it returns {strange}; a compiled function returns tensors and numbers")
        with mode:
            return [value if isinstance(value, Tensor) else torch.tensor(value) for value in out]

    module = _trace_flat(fn, flat, fakes)
    graph = module.graph
    _functionalise(fn, graph)
    erase_dead_nodes(graph)
    constants = {}
    for node in graph.find_nodes(op="get_attr"):
        constants[node.target] = getattr(module, node.target)
        node.meta.setdefault("val", torch.empty_like(constants[node.target], device="meta"))
    if canonical:
        canonicalise(graph)
    names = tuple(path for path, _ in named)
    return LogicalGraph(graph, names, constants, structure, out_structure[0])


def _trace_flat(fn: Callable, flat: Callable, fakes: list[Tensor]) -> fx.GraphModule:
    watch = Watch()

    def watched(*flat_args: Tensor) -> list[Tensor]:
        with watch, Calls(watch):
            return flat(*flat_args)

    try:
        with marking(), preserve_node_meta():
            module = make_fx(watched)(*fakes)
    except DataDependentOutputException as error:
        raise TraceError(
            f"cannot trace {_name(fn)}: {error.func}{_at(watch)} makes a Python value or a shape from the data of a tensor.\n"
            "Use torch.where and fixed shapes, or compute the value outside and close over it."
        ) from error
    except (DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        raise TraceError(
            f"cannot trace {_name(fn)}: the result of {getattr(error, 'func', error)}{_at(watch)} has a shape that depends on "
            "data.\nUse masks and fixed shapes (torch.where) instead."
        ) from error
    if watch.offenders:
        offenders = "\n  ".join(dict.fromkeys(watch.offenders))
        raise TraceError(f"cannot compile {_name(fn)}, it is not a pure function of static shapes:\n  {offenders}")
    return module


def _at(watch: Watch) -> str:
    return f" at {watch.line}" if watch.line else ""


def _functionalise(fn: Callable, graph: fx.Graph) -> None:
    """Replace in-place ops by ops that return their result. Torch's own functions contain such ops, which write into tensors that
    they have just made. Raise TraceError for any other in-place op."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        written: Any = node.args[0] if node.args else None
        form = functional_form(node.target)
        moves = torch.Tag.inplace_view in node.target.tags  # writes shape and strides, not data
        fresh = isinstance(written, fx.Node) and written.op == "call_function" and (moves or not _aliases(written))
        seen_later = fresh and any(order[user] > order[node] or _aliases(user) for user in written.users if user is not node)
        if form is None or not fresh or seen_later:
            where = f" at {source_line(node)}" if source_line(node) else ""
            raise TraceError(f"cannot compile {_name(fn)}: {node.target}{where} writes into a tensor that others may see")
        value = form(*fx.node.map_arg(node.args, _shape_only), **fx.node.map_arg(node.kwargs, _shape_only))
        node.target = form
        if value.dtype != node.meta["val"].dtype or value.shape != node.meta["val"].shape:
            raise TraceError(f"cannot compile {_name(fn)}: {form} does not give what {node.target} writes")


def _aliases(node: fx.Node) -> bool:
    """Whether the result of `node` shares memory with an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns) and not schema.is_mutable


def _shape_only(node: fx.Node) -> Any:
    return tree.map_leaves(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), node.meta["val"])


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
