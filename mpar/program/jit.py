"""jit: compile any pure function of tensors for a mesh, print the result, simulate it, or run it on DTensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mpar import tree
from mpar.compiler import choose_kernels, coordinates_of, generate
from mpar.dtensor import to_local, wrap
from mpar.errors import ShardingError
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.runtime import ALONE, Comm, ProcessComm, load
from mpar.sharding import Collective, RankGraph, bucket, check, collectives_of, describe_graph, lower, simulate_graph, trace
from mpar.spec import P, normalise
from mpar.strategy import AxisTable
from mpar.tree import Tree

__all__ = ["Compiled", "Lowered", "jit", "value_and_grad"]


def value_and_grad(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tree]]:
    """`value_and_grad(fn)(x, *others)` is `(fn(x, *others), gradients of the leaves of x)`: value first, as in JAX."""
    grad_and_value = torch.func.grad_and_value(fn)

    def wrapped(*args: Tree) -> tuple[Tensor, Tree]:
        grads, value = grad_and_value(*args)
        return value, grads

    return wrapped


def jit(
    fn: Callable[..., Tree], *, mesh: Mesh, in_specs: Tree = None, out_specs: Tree = None, table: AxisTable | None = None
) -> "Compiled":
    """Compile a pure function of pytrees of tensors for `mesh`.

    in_specs:  a tuple with one entry per argument, each a pytree of `P` that is a prefix of the argument (one `P` stands for a
               whole subtree). None is replicated.
    out_specs: the same for what `fn` returns; None leaves each result as its op makes it, except that pending sums are made.
    table:     from logical axis names, as used in `ops.constrain`, to mesh axes.
    """
    return Compiled(fn, mesh, in_specs, out_specs, table or {})


@dataclass(frozen=True)
class Compiled:
    """A function for a mesh: `lower` compiles it for given shapes; to call it runs it on the processes of this job."""

    fn: Callable[..., Tree]
    mesh: Mesh
    in_specs: Tree
    out_specs: Tree
    table: AxisTable
    _ready: dict[Any, "_Executable"] = field(default_factory=dict, repr=False, compare=False)

    def lower(self, *args: Tree) -> "Lowered":
        """Compile for tensors shaped like `args` (real or meta). Raises TraceError or ShardingError."""
        logical = trace(self.fn, args)
        in_specs = [spec or P() for spec in _broadcast("in_specs", self.in_specs, tuple(args), P())]
        probe = tree.unflatten(logical.outputs, logical.results)
        out_specs = _broadcast("out_specs", self.out_specs, probe, None)
        ranked = lower(logical, self.mesh, in_specs, out_specs, self.table)
        if any(spec.partial for spec in ranked.out_specs):
            resolved = [asked or spec.without_partial() for asked, spec in zip(out_specs, ranked.out_specs, strict=True)]
            ranked = lower(logical, self.mesh, in_specs, resolved, self.table)
        check(ranked)
        return Lowered(ranked)

    def __call__(self, *args: Tree) -> Any:
        """Run on DTensors placed by in_specs (on a mesh of one rank: plain tensors); results are DTensors placed by out_specs.

        The first call with arguments of new shapes compiles the function, for the device of the first tensor. Raises
        ShardingError, listing all arguments that are placed differently, and MeshError if the number of processes is not that of
        the ranks of the mesh.
        """
        leaves, structure = tree.flatten(tuple(args))
        device = next((x.device for x in leaves if x is not None), torch.device("cpu"))
        key = (structure, device, tuple(None if x is None else (tuple(x.shape), x.dtype) for x in leaves))
        if key not in self._ready:
            self._ready[key] = _Executable(self.lower(*args).ranked, device)
        return self._ready[key]([x for x in leaves if x is not None])


@dataclass(frozen=True)
class Lowered:
    """A compiled function: `print` it, list its collectives, simulate it."""

    ranked: RankGraph

    def simulate(self, *args: Tree) -> Any:
        """What the function returns on global tensors, computed by all ranks in one process."""
        results = simulate_graph(self.ranked, [leaf for leaf in tree.leaves(tuple(args)) if leaf is not None])
        return tree.unflatten(self.ranked.logical.outputs, results)

    def collectives(self) -> list[Collective]:
        """Every collective in order."""
        return collectives_of(self.ranked)

    @cached_property
    def out_specs(self) -> Tree:
        """The specs of the results."""
        return tree.unflatten(self.ranked.logical.outputs, self.ranked.out_specs)

    def __str__(self) -> str:
        return describe_graph(self.ranked)


class _Executable:
    """A rank graph with loaded code and, on more than one rank, the processes that it runs on."""

    def __init__(self, ranked: RankGraph, device: torch.device) -> None:
        self.ranked, mesh = ranked, ranked.mesh
        bucket(ranked.graph)  # such as the sums of small gradients, each of which would be a message
        choose_kernels(ranked.graph, kernels_for("auto", device))
        source = generate(ranked.graph)
        self.run = load("jit", source, ranked.logical.constants, device)
        self.device_mesh: DeviceMesh | None = None if mesh.size == 1 else mesh.bind(device.type)
        uses = {c.axes for c in collectives_of(ranked)} | set(coordinates_of(ranked.graph))
        self.comm: Comm = ALONE if mesh.size == 1 else ProcessComm(mesh, uses, device=device)

    def __call__(self, leaves: list[Tensor]) -> Any:
        ranked = self.ranked
        with torch.no_grad():
            results = self.run(self.local(leaves), self.comm)
        if self.device_mesh is None:
            return tree.unflatten(ranked.logical.outputs, results)
        wrapped = [wrap(x, spec, ranked.mesh, self.device_mesh) for x, spec in zip(results, ranked.out_specs, strict=True)]
        return tree.unflatten(ranked.logical.outputs, wrapped)

    def local(self, leaves: list[Tensor]) -> list[Tensor]:
        """This rank's shards of the arguments. Raises ShardingError, listing all that are not placed by in_specs."""
        if self.device_mesh is None:
            return list(leaves)
        out, problems = [], []
        for name, leaf, expected in zip(self.ranked.logical.names, leaves, self.ranked.in_specs, strict=True):
            if not isinstance(leaf, DTensor):
                problems.append(
                    f"argument {name} {tuple(leaf.shape)} is a plain tensor, a DTensor placed by {expected} was expected"
                )
                continue
            local, spec = to_local(leaf, self.ranked.mesh)
            if normalise(spec, self.ranked.mesh) != expected:
                problems.append(f"argument {name} {tuple(leaf.shape)} is placed by {spec}, {expected} was expected")
            out.append(local)
        if problems:
            raise ShardingError(
                "cannot run a compiled function on these arguments:\n  "
                + "\n  ".join(problems)
                + f"\nmesh: {self.ranked.mesh}. Redistribute them, or compile with the in_specs that they have."
            )
        return out


def _broadcast(name: str, prefix: Any, full: Any, default: P | None) -> list[P | None]:
    """One spec for each leaf of `full`, from a tree of specs that is a prefix of it."""
    if prefix is None or isinstance(prefix, P):
        return [default if prefix is None else prefix] * sum(leaf is not None for leaf in tree.leaves(full))
    children, expected = _children(prefix), _children(full)
    if children is None or expected is None or children.keys() != expected.keys():
        raise ShardingError(
            f"{name}: the tree of specs does not match the values: it has {prefix!r} where the value has "
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
