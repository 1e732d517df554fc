"""jit: compile any pure function of tensors for a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ShardingError
from mpar.mesh import Mesh
from mpar.sharding import _collectives as collectives
from mpar.sharding._check import check
from mpar.sharding._lower import RankGraph, lower
from mpar.sharding._simulate import simulate_graph
from mpar.sharding._trace import trace
from mpar.spec import P
from mpar.strategy import AxisTable

__all__ = ["Collective", "Compiled", "Lowered", "collectives_of", "jit", "value_and_grad"]


@dataclass(frozen=True)
class Collective:
    """One collective of a rank graph: what one rank contributes (`bytes`), over which mesh axes, from which line."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    line: str

    def __str__(self) -> str:
        return f"{self.op:14} {' x '.join(self.axes):12} {self.bytes:>14,} B  {self.line}"


def value_and_grad(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Any]]:
    """`value_and_grad(fn)(x, *rest) == (fn(x, *rest), gradients of the leaves of x)`, in JAX's order."""
    grad_and_value = torch.func.grad_and_value(fn)

    def wrapped(*args: Any) -> tuple[Tensor, Any]:
        grads, value = grad_and_value(*args)
        return value, grads

    return wrapped


def jit(
    fn: Callable[..., Any], *, mesh: Mesh, in_specs: Any = None, out_specs: Any = None, table: AxisTable | None = None
) -> "Compiled":
    """Compile a pure function of pytrees of tensors for `mesh`.

    in_specs:  a tuple with one entry per argument, each a pytree of `P` that is a prefix of the argument (one `P` for a whole
               subtree). None is replicated.
    out_specs: the same for what `fn` returns; None lets each result stay as its op leaves it, pending sums carried out.
    table:     logical axis names, as used in `ops.constrain`, to mesh axes.
    """
    return Compiled(fn, mesh, in_specs, out_specs, table or {})


@dataclass(frozen=True)
class Compiled:
    """A function and where it will run; `lower` compiles it for given shapes."""

    fn: Callable[..., Any]
    mesh: Mesh
    in_specs: Any
    out_specs: Any
    table: AxisTable

    def lower(self, *args: Any) -> "Lowered":
        """Compile for tensors shaped like `args` (real or meta). Raises TraceError or ShardingError."""
        logical = trace(self.fn, args)
        in_specs = _broadcast("in_specs", self.in_specs, tuple(args), P())
        probe = tree.unflatten(logical.outputs, logical.results)
        out_specs = _broadcast("out_specs", self.out_specs, probe, None)
        ranked = lower(logical, self.mesh, in_specs, out_specs, self.table)
        if any(spec.partial for spec in ranked.out_specs):
            resolved = [given or spec.without_partial() for given, spec in zip(out_specs, ranked.out_specs, strict=True)]
            ranked = lower(logical, self.mesh, in_specs, resolved, self.table)
        check(ranked)
        return Lowered(ranked)


@dataclass(frozen=True)
class Lowered:
    """A compiled function: `print` it, list its collectives, simulate it."""

    ranked: RankGraph

    def simulate(self, *args: Any) -> Any:
        """What the function returns on global tensors, computed by all ranks in one process."""
        leaves = [leaf for leaf in tree.leaves(tuple(args)) if leaf is not None]
        results = simulate_graph(self.ranked, leaves)
        return tree.unflatten(self.ranked.logical.outputs, results)

    def collectives(self) -> list[Collective]:
        """Every collective in order."""
        return collectives_of(self.ranked)

    @cached_property
    def out_specs(self) -> Any:
        """Where the results live."""
        return tree.unflatten(self.ranked.logical.outputs, self.ranked.out_specs)

    def __str__(self) -> str:
        return describe_graph(self.ranked)


def collectives_of(ranked: RankGraph) -> list[Collective]:
    """The collectives of a rank graph in order."""
    return [
        Collective(node.target.__name__, node.kwargs["axes"], node.args[0].meta["val"].nbytes, node.meta["line"])
        for node in ranked.graph.nodes
        if node.target in collectives.COLLECTIVES
    ]


def describe_graph(ranked: RankGraph) -> str:
    """The rank graph as text, a line a node: name, local shape, spec, op, operands, source line."""
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


def _broadcast(name: str, prefix: Any, full: Any, default: P | None) -> list[P | None]:
    """One spec per leaf of `full` from a prefix tree of specs."""
    if prefix is None or isinstance(prefix, P):
        return [default if prefix is None else prefix] * sum(leaf is not None for leaf in tree.leaves(full))
    children, expected = _children(prefix), _children(full)
    if children is None or expected is None or children.keys() != expected.keys():
        raise ShardingError(
            f"{name}: the tree of specs does not match the values: {prefix!r} stands where the value has "
            f"{sorted(expected) if expected else 'a tensor'}.\n"
            "Give a P(...) for a whole subtree, or the same structure as the value."
        )
    return [spec for key in expected for spec in _broadcast(f"{name}.{key}", children[key], expected[key], default)]


def _children(node: Any) -> dict[str, Any] | None:
    if isinstance(node, dict):
        return {str(key): value for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return {str(i): value for i, value in enumerate(node)}
    if hasattr(node, "__dataclass_fields__") and not isinstance(node, P):
        return {key: getattr(node, key) for key in node.__dataclass_fields__}
    return None
