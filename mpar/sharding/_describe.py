"""Describe: a rank graph as text, and the collectives in it."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mpar.sharding import _collectives as collectives
from mpar.sharding._control import CONTROL
from mpar.sharding._lower import RankGraph

__all__ = ["Collective", "collectives_of", "describe_graph"]


@dataclass(frozen=True)
class Collective:
    """One collective of a rank graph: what one rank contributes (`bytes`), over which mesh axes, from which line.

    times: how often it runs: once in every step of each scan around it. A loop with a test is counted as one step.
    """

    op: str
    axes: tuple[str, ...]
    bytes: int
    line: str
    times: int = 1

    def __str__(self) -> str:
        times = f"{self.times} x " if self.times > 1 else ""
        return f"{self.op:14} {' x '.join(self.axes):12} {f'{times}{self.bytes:,}':>14} B  {self.line}"


def collectives_of(ranked: RankGraph) -> list[Collective]:
    """The collectives of a rank graph in order, those of the bodies of control flow among them."""
    return list(_collectives(ranked, 1))


def _collectives(ranked: RankGraph, times: int) -> Iterator[Collective]:
    for node in ranked.graph.nodes:
        if node.target in CONTROL.values():
            flow = node.kwargs["flow"]
            for body in flow.bodies.values():
                yield from _collectives(body, times * getattr(flow, "length", 1))
        elif node.target in collectives.COLLECTIVES:
            nbytes = collectives.bytes_of(node)
            yield Collective(node.target.__name__, node.kwargs["axes"], nbytes, node.meta["line"], times)


def describe_graph(ranked: RankGraph) -> str:
    """The rank graph as text, one line for each node: name, local shape, spec, op, operands, source line. Below control flow
    stand the graphs of its bodies."""
    return "\n".join([f"rank graph on {ranked.mesh}", *_lines(ranked)])


def _lines(ranked: RankGraph) -> Iterator[str]:
    for node in ranked.graph.nodes:
        if node.op == "output":
            yield f"return {', '.join(f'%{n.name}: {spec}' for n, spec in zip(node.args[0], ranked.out_specs, strict=True))}"
            continue
        value, spec = node.meta["val"], node.meta.get("spec")
        kind = (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        op = (
            node.op if node.op != "call_function" else getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        )
        operands = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        line = f"  # {node.meta['line']}" if node.meta.get("line") else ""
        yield f"%{node.name}: {kind} {spec if spec is not None else ''} = {op}({operands}){line}"
        for name, body in node.kwargs["flow"].bodies.items() if node.target in CONTROL.values() else ():
            yield f"    {name}:"
            yield from (f"        {text}" for text in _lines(body))
