"""jit: compile any pure function of tensors for a mesh, print the result, simulate it, or run it on DTensors."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mpar import tree
from mpar.compiler import choose_kernels, coordinates_of, generate
from mpar.dtensor import to_local, wrap
from mpar.errors import ConfigError, ShardingError, TraceError
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.runtime import ALONE, Comm, ProcessComm, load
from mpar.sharding import (
    Collective,
    RankGraph,
    bucket,
    check,
    collectives_of,
    copy_bodies,
    describe_graph,
    lower,
    simulate_graph,
    trace,
)
from mpar.spec import P, normalise
from mpar.strategy import AxisTable
from mpar.tree import Tree

__all__ = ["Compiled", "Lowered", "jit", "value_and_grad"]


def value_and_grad(
    fn: Callable[..., Tree], *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., tuple[Tree, Tree]]:
    """`value_and_grad(fn)(x, *others)` is `(fn(x, *others), gradients of the leaves of x)`: value first, as in JAX.

    argnums: the number of the argument that is differentiated, or several.
    has_aux: whether `fn` returns `(value, aux)`; aux is not differentiated, and the result is `((value, aux), gradients)`.
    """

    def wrapped(*args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        aux: list[Tree] = []

        def of_tensors(*args: Tree, **kwargs: Tree) -> tuple[Tree, list[Tensor]]:
            value, extra = cast(tuple[Tree, Tree], fn(*args, **kwargs)) if has_aux else (fn(*args, **kwargs), None)
            aux.append(extra)
            return value, [leaf for leaf in tree.leaves(extra) if isinstance(leaf, Tensor)]

        grads, (value, tensors) = torch.func.grad_and_value(of_tensors, argnums=argnums, has_aux=True)(*args, **kwargs)
        if not has_aux:
            return value, grads
        outside = iter(tensors)
        return (value, tree.map_leaves(lambda leaf: next(outside) if isinstance(leaf, Tensor) else leaf, aux[-1])), grads

    return wrapped


def jit(
    fn: Callable[..., Tree],
    *,
    mesh: Mesh,
    in_specs: Tree = None,
    out_specs: Tree = None,
    table: AxisTable | None = None,
    static: Sequence[str] = (),
) -> "Compiled":
    """Compile a pure function of pytrees of tensors for `mesh`.

    in_specs:  a tuple with one entry per argument, each a pytree of `P` that is a prefix of the argument (one `P` stands for a
               whole subtree). None is replicated. Or a dict from the names of parameters to such entries.
    out_specs: the same for what `fn` returns; None leaves each result as its op makes it, except that pending sums are made.
    table:     from logical axis names, as used in `ops.constrain`, to mesh axes.
    static:    the names of parameters that take hashable values of Python, such as flags; they have no entry in `in_specs`. The
               function is compiled anew for each value.

    Raises ConfigError if `static` or `in_specs` names a parameter that `fn` does not have.
    """
    named = [*static, *(in_specs if isinstance(in_specs, dict) else ())]
    known = inspect.signature(fn).parameters if named else {}
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ConfigError(f"jit: {_name(fn)} has no parameters {unknown}; it has {list(known)}")
    return Compiled(fn, mesh, in_specs, out_specs, table or {}, tuple(static))


@dataclass(frozen=True)
class Compiled:
    """A function for a mesh: `lower` compiles it for given shapes; to call it runs it on the processes of this job."""

    fn: Callable[..., Tree]
    mesh: Mesh
    in_specs: Tree
    out_specs: Tree
    table: AxisTable
    static: tuple[str, ...] = ()
    _ready: dict[Any, "_Executable"] = field(default_factory=dict, repr=False, compare=False)

    def lower(self, *args: Tree, **kwargs: Tree) -> "Lowered":
        """Compile for tensors shaped like the arguments (real or meta). Raises TraceError or ShardingError."""
        call = self.bind(args, kwargs)
        logical = trace(call.fn, call.args)
        given = self.in_specs
        given = tuple(given.get(name) for name in call.names) if isinstance(given, dict) else given
        in_specs = [spec or P() for spec in _broadcast("in_specs", given, call.args, P())]
        probe = tree.unflatten(logical.outputs, logical.results)
        out_specs = _broadcast("out_specs", self.out_specs, probe, None)
        ranked = lower(logical, self.mesh, in_specs, out_specs, self.table)
        if any(spec.partial for spec in ranked.out_specs):
            resolved = [asked or spec.without_partial() for asked, spec in zip(out_specs, ranked.out_specs, strict=True)]
            ranked = lower(logical, self.mesh, in_specs, resolved, self.table)
        check(ranked)
        return Lowered(ranked, self)

    def bind(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree]) -> "_Call":
        """The call of the function with these arguments, in the order of its parameters.

        Raises TraceError if they do not fit the parameters, or if a static value is not hashable.
        """
        if not kwargs and not self.static and not isinstance(self.in_specs, dict):
            return _Call(self.fn, args, (), ())
        signature = inspect.signature(self.fn)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TraceError(f"cannot call {_name(self.fn)}{signature}: {error}") from error
        static = {name: bound.pop(name) for name in self.static if name in bound}
        changing = [name for name, value in static.items() if not isinstance(value, Hashable)]
        if changing:
            raise TraceError(f"cannot compile {_name(self.fn)}: the values of the static parameters {changing} are not hashable")
        names = tuple(bound)

        @functools.wraps(self.fn)
        def call(*values: Tree) -> Tree:
            arguments = inspect.BoundArguments(signature, {**static, **dict(zip(names, values, strict=True))})
            return self.fn(*arguments.args, **arguments.kwargs)

        return _Call(call, tuple(bound.values()), names, tuple(static.items()))

    def __call__(self, *args: Tree, **kwargs: Tree) -> Any:
        """Run on DTensors placed by in_specs (on a mesh of one rank: plain tensors); results are DTensors placed by out_specs.

        The first call with arguments of new shapes compiles the function, for the device of the first tensor. Raises
        ShardingError, listing all arguments that are placed differently, and MeshError if the number of processes is not that of
        the ranks of the mesh.
        """
        call = self.bind(args, kwargs)
        leaves, structure = tree.flatten_present(call.args)
        device = leaves[0].device if leaves and isinstance(leaves[0], Tensor) else torch.device("cpu")
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in leaves)
        key = (structure, device, shapes, call.names, tuple((name, type(value), value) for name, value in call.static))
        if key not in self._ready:
            self._ready[key] = _Executable(self.lower(*args, **kwargs).ranked, device)
        return self._ready[key](leaves)


@dataclass(frozen=True)
class _Call:
    """A call whose arguments hold tensors only.

    names:  the parameters that take the arguments; empty if the function takes them by position.
    static: the values of static parameters, which `fn` has already.
    """

    fn: Callable[..., Tree]
    args: tuple[Tree, ...]
    names: tuple[str, ...]
    static: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Lowered:
    """A compiled function: `print` it, list its collectives, simulate it."""

    ranked: RankGraph
    compiled: Compiled

    def simulate(self, *args: Tree, **kwargs: Tree) -> Any:
        """What the function returns on global tensors, computed by all ranks in one process."""
        results = simulate_graph(self.ranked, tree.flatten_present(self.compiled.bind(args, kwargs).args)[0])
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
        for graph in (*(body.graph for body in copy_bodies(ranked.graph)), ranked.graph):
            bucket(graph)  # such as the sums of small gradients, each of which would be a message
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


def _name(fn: Callable) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


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
