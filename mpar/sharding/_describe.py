"""Describe: a rank graph as text, and the collectives in it."""

from dataclasses import dataclass

from torch import Tensor

from mpar.sharding import _collectives as collectives
from mpar.sharding._lower import RankGraph

__all__ = ["Collective", "collectives_of", "describe_graph"]


@dataclass(frozen=True)
class Collective:
    """One collective of a rank graph: what one rank contributes (`bytes`), over which mesh axes, from which line."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    line: str

    def __str__(self) -> str:
        return f"{self.op:14} {' x '.join(self.axes):12} {self.bytes:>14,} B  {self.line}"


def collectives_of(ranked: RankGraph) -> list[Collective]:
    """The collectives of a rank graph in order."""
    return [
        Collective(node.target.__name__, node.kwargs["axes"], collectives.bytes_of(node), node.meta["line"])
        for node in ranked.graph.nodes
        if node.target in collectives.COLLECTIVES
    ]


def describe_graph(ranked: RankGraph) -> str:
    """The rank graph as text, one line for each node: name, local shape, spec, op, operands, source line."""
    lines = [f"rank graph on {ranked.mesh}"]
    for node in ranked.graph.nodes:
        if node.op == "output":
            lines.append(
                f"return {', '.join(f'%{n.name}: {spec}' for n, spec in zip(node.args[0], ranked.out_specs, strict=True))}"
            )
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
        lines.append(f"%{node.name}: {kind} {spec if spec is not None else ''} = {op}({operands}){line}")
    return "\n".join(lines)
