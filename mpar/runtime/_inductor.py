"""Inductor: torch's compiler takes the code of a segment, and fuses its operations, also with those of references.

The code is recorded as a graph, and shapes are those of the program, so nothing is checked at a call but strides. Calls of
communication and of control flow stay between the parts that are compiled. A primitive is a torch op of its own. If that is a
reference, torch traces what it calls. Other implementations, and references that are opaque or read data on the host, are called
as they are: the shapes of their results follow from the abstract rule, and an op that overwrites operands says which. An operand
that is more than a tensor, such as a `PackedMatrix`, is nothing that Inductor knows, so what reads it is called as it is, too.
"""

import functools
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mpar.code_facts import code_facts, digest_of
from mpar.kernels import REFERENCE, implementation
from mpar.ops import (
    OPAQUE_OPS,
    PRIMITIVES,
    PackedMatrix,
    Primitive,
    few_rows_read_columns,
    joined_product,
    lie_side_by_side,
    matmul_is_faster,
)
from mpar.runtime.comm import Comm
from mpar.torch_private import OpOverload, inductor_compile, onednn_has_bfloat16, onednn_is_faster, pytree, split_graph

__all__ = ["Neighbours", "apart", "compiled", "for_inductor"]

Neighbours = Sequence[tuple[Sequence[int], int]]
"""Groups of operands that may lie side by side, as `Kind.neighbours` has them."""
Code = Callable[[list[Tensor], Comm], tuple[Tensor, ...]]
_LIBRARY = torch.library.Library("mpar_kernels", "DEF")
_strides = Tensor.stride
_FUNCTIONS: dict[object, Callable[..., object]] = {}
"""What the ops of the library call, which a torch op does not do for tensors of other classes."""
_OPAQUE: dict[OpOverload, Callable[..., object]] = dict(OPAQUE_OPS)
"""What Inductor's code calls for ops that torch does not look into."""
_PROCESS = uuid.uuid4().hex
"""Code of functions from outside mpar is compiled for this process alone: nobody knows what else they call."""


@functools.cache
def for_inductor(primitive: str, name: str = REFERENCE) -> Callable[..., object]:
    """What code that Inductor compiles calls for the implementation `name` of `primitive`: a torch op of its own."""
    declared, op, run = PRIMITIVES[primitive], f"{primitive}_{name}", implementation(primitive, name)
    schema = str(declared.op._schema).removeprefix(f"mpar::{primitive}")
    if name == REFERENCE and not (declared.opaque or declared.asks_host):
        return _define(op, schema, run, "CompositeImplicitAutograd")  # torch traces what it calls
    if not declared.mutates:
        return _define_opaque(op, schema, run, declared.abstract)
    fresh = max(0, len(declared.results) - len(declared.mutates))
    abstract = _first_results(declared.abstract, fresh)
    defined = _define_opaque(op, _overwriting(schema, declared, fresh), _first_results(run, fresh), abstract)
    return _with_operands(defined, declared, fresh)


def _define(op: str, schema: str, run: Callable[..., object], key: str) -> OpOverload:
    """Define an op that calls `run`; `key` is of torch's dispatcher."""
    _LIBRARY.define(f"{op}{schema}")
    _LIBRARY.impl(op, run, key)
    defined = getattr(torch.ops.mpar_kernels, op).default
    _FUNCTIONS[defined] = run
    return defined


def _define_opaque(
    op: str, schema: str, run: Callable[..., object], abstract: Callable[..., object] | None
) -> OpOverload:
    """Define an op that torch does not look into."""
    defined = _define(op, schema, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mpar_kernels::{op}", abstract, lib=_LIBRARY)
    _OPAQUE[defined] = run
    return defined


def _overwriting(schema: str, primitive: Primitive, fresh: int) -> str:
    """The schema of an op that overwrites the operands that `primitive` overwrites, and returns so many of its first results."""
    operands, _ = schema.split(" -> ")
    for index, name in enumerate(primitive.mutates):
        operands = re.sub(rf"Tensor(?=(\[\])? {name}[,)])", f"Tensor(a{index}!)", operands)
    return f"{operands} -> ({', '.join(['Tensor'] * fresh)})"


def _first_results(run: Callable[..., Any] | None, count: int) -> Callable[..., Any]:
    """`run`, which returns its first results; the others are operands, so that the caller has them."""
    assert run is not None

    def call(*operands: object, **params: object) -> object:
        results = run(*operands, **params)
        return results[0] if count == 1 else tuple(results[:count]) if count else None

    return call


def _with_operands(call: Callable[..., Any], primitive: Primitive, fresh: int) -> Callable[..., object]:
    """`call`, and behind its results the operands that are the last results of a primitive: what it names first among those that
    it overwrites."""
    places = [primitive.operands.index(name) for name in primitive.mutates[: len(primitive.results)]]

    def with_results(*operands: object, **params: object) -> object:
        made = call(*operands, **params)
        first = () if not fresh else (made,) if fresh == 1 else (made[index] for index in range(fresh))
        results = (*first, *(operands[place] for place in places))
        return results if len(results) > 1 else results[0]

    return with_results


class _Call:
    """A function that is called between parts of a graph that are compiled."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__, self.function = name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def apart(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """`function`, which is not compiled where Inductor compiles code that calls it. Functions among its arguments get tensors."""

    def call(*args: object, **kwargs: object) -> object:
        proxies = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Proxy)]
        if not proxies:
            return function(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", _Call(name, functools.partial(function, **kwargs)), args, {})

    return call


class _Apart:
    """Communication, each call of which is apart from what is compiled."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return apart(name, found) if callable(found) else found


class _Recorder(fx.proxy.GraphAppendingTracer):
    """Writes down what code calls; tensors that it has itself become constants of `root`."""

    def __init__(self, graph: fx.Graph, root: torch.nn.Module) -> None:
        super().__init__(graph)
        self.root = root

    def create_arg(self, a: object) -> object:
        if not isinstance(a, Tensor):
            return super().create_arg(a)  # type: ignore[arg-type]
        name = f"constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, a)
        return self.graph.get_attr(name)


class _Recording(TorchFunctionMode):
    """In this context a recorder writes down ops that have no operands, such as those that make zeros, like all others."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.recorder.create_proxy("call_function", func, args, dict(kwargs or {}))


def compiled(run: Code, neighbours: Neighbours = ()) -> Code:
    """`run` compiled by Inductor when it is first called. Operands are not freed before it returns. neighbours: as in `Kind`."""
    functions: dict[tuple[object, ...], Callable[..., tuple[Tensor, ...]]] = {}

    def call(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
        places = [_distance(args[i], args[group[0]]) for group, _ in neighbours for i in group[1:]]
        key = (id(comm), *places, *map(type, args), *map(_strides, args))  # shapes and dtypes are those of the program
        if key not in functions:
            functions[key] = _compile(run, args, comm, neighbours)
        operands = tuple(args)
        args.clear()
        return functions[key](*operands)

    return call


def _distance(x: Tensor, first: Tensor) -> int:
    """How many bytes there are from one tensor in memory to another; 0 for packed matrices, which torch does not compile."""
    return 0 if PackedMatrix in (type(x), type(first)) else x.data_ptr() - first.data_ptr()


def _compile(run: Code, operands: Sequence[Tensor], comm: Comm, neighbours: Neighbours) -> Callable[..., tuple[Tensor, ...]]:
    """A function of operands like these. What code does between two calls that are apart is compiled as one."""
    root = torch.nn.Module()
    graph = fx.Graph(root)
    recorder = _Recorder(graph, root)
    proxies: list[Any] = [fx.Proxy(graph.placeholder(f"x{i}"), recorder) for i in range(len(operands))]
    with _Recording(recorder):
        results = run(proxies, cast(Comm, _Apart(comm)))
    graph.output(recorder.create_arg(results))
    given = graph.find_nodes(op="placeholder")
    for node, operand in zip(given, operands, strict=True):
        if type(operand) not in (Tensor, Parameter):
            _call_readers_apart(node)
    for places, num_summed in neighbours:
        weights = [operands[i] for i in places]
        if lie_side_by_side(weights, num_summed):
            _multiply_as_one(given[places[0]], num_summed, sum(weight.shape[num_summed:].numel() for weight in weights))
    whole, part_of = fx.GraphModule(root, graph), _parts(graph)
    if not any(number % 2 for number in part_of.values()):
        return _by_inductor(whole, operands)
    split = split_graph(whole, lambda node: part_of[node.name])
    for name, part in list(split.named_children()):
        if not int(name.removeprefix("submod_")) % 2:
            setattr(split, name, _WhenCalled(cast(fx.GraphModule, part)))
    return cast(Callable[..., tuple[Tensor, ...]], split)


def _by_inductor(graph: fx.GraphModule, operands: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A graph compiled for such operands. In the graph mpar's ops are names, so torch's cache is told what they are here."""
    functions = [_FUNCTIONS[node.target] for node in graph.graph.nodes if node.target in _FUNCTIONS]
    products = few_rows_read_columns(torch.float32), onednn_has_bfloat16(), onednn_is_faster(), matmul_is_faster()
    facts: list[object] = [code_facts(["torch"]), products]
    if not all(f"{getattr(function, '__module__', '')}.".startswith("mpar.") for function in functions):
        facts.append(_PROCESS)
    return inductor_compile(graph, operands, _OPAQUE, digest_of([("facts", repr(facts).encode())]))


def _call_readers_apart(operand: fx.Node) -> None:
    """Everything that reads `operand` is called between the parts that are compiled."""
    for node in operand.users:
        if node.op == "call_function" and not isinstance(node.target, _Call):
            function = cast(Callable[..., object], node.target)
            node.target = _Call(str(function), _FUNCTIONS.get(function, function))
        elif node.op == "call_method":
            node.op, node.target = "call_function", _Call(str(node.target), getattr(Tensor, str(node.target)))


def _multiply_as_one(first: fx.Node, num_summed: int, columns: int) -> None:
    """Let joined products, the first weight of which is `first`, read memory as one matrix of so many columns. torch would trace
    each operand on its own, and not see that they lie side by side."""
    joined = for_inductor("joined_linear")
    for node in list(first.users):
        if node.target == joined and node.args[1][0] is first:  # type: ignore[index]
            node.target, node.args, node.kwargs = joined_product, (node.args[0], first, num_summed, columns), {}


def _parts(graph: fx.Graph) -> dict[str, int]:
    """The number of the part of each node by its name; calls that are apart, and the items of their results, are in odd ones."""
    number, found, are_apart = 0, {}, set()
    for node in graph.nodes:
        if isinstance(node.target, _Call) or (node.target is operator.getitem and node.args[0] in are_apart):
            are_apart.add(node)
        number += (node in are_apart) != bool(number % 2)
        found[node.name] = number
    return found


class _WhenCalled(torch.nn.Module):
    """A part of a graph, which is compiled when it is first called."""

    def __init__(self, part: fx.GraphModule) -> None:
        super().__init__()
        self.part = part
        self.function: Callable[..., tuple[Tensor, ...]] | None = None

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if self.function is None:
            self.function = _by_inductor(self.part, operands)
        return self.function(*operands)
