"""Control flow as ops: `scan`, `cond` and `while_loop` are nodes of a graph whose bodies are graphs themselves.

While a function is traced, control flow is the torch op `mpar::control`, which names its bodies by a key, so that transforms of
`torch.func` see an ordinary op. In the graph that tracing returns, and in rank graphs, it is one of the functions here, whose
parameter `flow` holds the bodies. They take tensors without data and give those of the results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor, fx

__all__ = [
    "CONTROL",
    "Cond",
    "Flow",
    "HasGraph",
    "Scan",
    "While",
    "bodies_of",
    "cond",
    "copy_bodies",
    "num_turns",
    "scan",
    "values_of",
    "while_loop",
]


T = TypeVar("T")


class HasGraph(Protocol):
    """A body: traced, logical or lowered."""

    @property
    def graph(self) -> fx.Graph:
        """Its graph; the placeholders are its operands, and the output is the tuple of its results."""
        ...


B = TypeVar("B", bound=HasGraph)
C = TypeVar("C", bound=HasGraph)


@dataclass(frozen=True, eq=False)
class Scan(Generic[B]):
    """A loop over slices of tensors. Its operands are (carries, xs, captured), its results (carries, stacked ys, sums).

    body:    (carries, slices of the xs, captured) -> (carries, ys, terms of sums).
    reverse: whether the last slice comes first.
    length:  the number of turns.
    """

    body: B = field(repr=False)
    num_carries: int
    num_xs: int
    num_sums: int
    length: int
    reverse: bool = False

    @property
    def bodies(self) -> dict[str, B]:
        """The bodies by name."""
        return {"body": self.body}

    def with_bodies(self, **bodies: C) -> "Scan[C]":
        """The same flow with other bodies."""
        return replace(self, **bodies)  # type: ignore[arg-type, return-value]

    @property
    def params(self) -> dict[str, int | bool]:
        """What `mpar.control.scan` takes besides operands and body."""
        counts = {"num_carries": self.num_carries, "num_xs": self.num_xs, "num_sums": self.num_sums}
        return {**counts, "length": self.length, "reverse": self.reverse}

    def parts(self, results: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Results of the scan, or of its body: carries, ys, sums."""
        first_sum = len(results) - self.num_sums
        return list(results[: self.num_carries]), list(results[self.num_carries : first_sum]), list(results[first_sum:])

    def operands(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Operands of the scan, or of its body: carries, xs, captured."""
        first, last = self.num_carries, self.num_carries + self.num_xs
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])


@dataclass(frozen=True, eq=False)
class Cond(Generic[B]):
    """A choice between two branches. Its operands are a predicate and what both branches take; both return the same results."""

    if_true: B = field(repr=False)
    if_false: B = field(repr=False)

    @property
    def bodies(self) -> dict[str, B]:
        """The bodies by name."""
        return {"if_true": self.if_true, "if_false": self.if_false}

    @property
    def params(self) -> dict[str, int | bool]:
        """What `mpar.control.cond` takes besides operands and bodies."""
        return {}

    def with_bodies(self, **bodies: C) -> "Cond[C]":
        """The same flow with other bodies."""
        return replace(self, **bodies)  # type: ignore[arg-type, return-value]


@dataclass(frozen=True, eq=False)
class While(Generic[B]):
    """A loop while a test holds. Operands are (carries, captured), which the test and the body take; results are the carries."""

    test: B = field(repr=False)
    body: B = field(repr=False)
    num_carries: int

    @property
    def bodies(self) -> dict[str, B]:
        """The bodies by name."""
        return {"test": self.test, "body": self.body}

    @property
    def params(self) -> dict[str, int | bool]:
        """What `mpar.control.while_loop` takes besides operands and bodies."""
        return {"num_carries": self.num_carries}

    def with_bodies(self, **bodies: C) -> "While[C]":
        """The same flow with other bodies."""
        return replace(self, **bodies)  # type: ignore[arg-type, return-value]


Flow = Scan[B] | Cond[B] | While[B]


def scan(operands: Sequence[Tensor], *, flow: Scan) -> tuple[Tensor, ...]:
    """The results of a scan, without data."""
    return values_of(flow, operands)


def cond(operands: Sequence[Tensor], *, flow: Cond) -> tuple[Tensor, ...]:
    """The results of a choice between two branches, without data."""
    return values_of(flow, operands)


def while_loop(operands: Sequence[Tensor], *, flow: While) -> tuple[Tensor, ...]:
    """The results of a loop while a test holds, without data."""
    return values_of(flow, operands)


CONTROL: dict[type, Callable[..., tuple[Tensor, ...]]] = {Scan: scan, Cond: cond, While: while_loop}
"""For each kind of flow the target of its nodes."""


def values_of(flow: Flow, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Contiguous tensors, made as `operands[0]` is, that look like the results of a flow."""
    body = flow.if_true if isinstance(flow, Cond) else flow.body
    values = [node.meta["val"] for node in body.graph.output_node().args[0]]
    shapes = [tuple(value.shape) for value in values]
    if isinstance(flow, Scan):
        carries, ys, sums = flow.parts(shapes)
        shapes = [*carries, *((flow.length, *shape) for shape in ys), *sums]
    return tuple(operands[0].new_empty(shape, dtype=value.dtype) for shape, value in zip(shapes, values, strict=True))


def bodies_of(graph: fx.Graph) -> Iterator[HasGraph]:
    """The bodies of all flows in a graph, inner ones before outer ones."""
    for node in graph.nodes:
        for body in node.kwargs["flow"].bodies.values() if node.target in CONTROL.values() else ():
            yield from bodies_of(body.graph)
            yield body


def copy_bodies(graph: fx.Graph) -> list[HasGraph]:
    """Give a graph copies of the bodies of its flows, which passes may change; returns them, inner ones first."""
    found: list[HasGraph] = []
    for node in graph.nodes:
        if node.target in CONTROL.values():
            copies = {}
            for name, body in node.kwargs["flow"].bodies.items():
                copy = fx.Graph()
                copy.output(copy.graph_copy(body.graph, {}))
                found += copy_bodies(copy)
                copies[name] = replace(body, graph=copy)
                found.append(copies[name])
            node.kwargs = {**node.kwargs, "flow": node.kwargs["flow"].with_bodies(**copies)}
    return found


def num_turns(flow: Flow) -> int:
    """How often the bodies of a flow run; a loop with a test counts as one turn, because only the data says how many it has."""
    return flow.length if isinstance(flow, Scan) else 1
