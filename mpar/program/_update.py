"""The end of a step as segments: square sums of gradients, the global norm, and the optimizer's rule on storage specs."""

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from mpar.ops import constrain, sum_squares
from mpar.ops._adamw import adamw_many_p, adamw_p
from mpar.ops._primitive import Primitive
from mpar.ops._sgd import sgd_many_p, sgd_p
from mpar.program._segments import Code, compile_function
from mpar.sharding._pass import graph_pass
from mpar.spec import P

if TYPE_CHECKING:
    from mpar.program._build import _Builder, _Unit

__all__ = ["compile_norm", "compile_squares", "compile_update", "join_updates"]

aten = torch.ops.aten
MANY: dict[Primitive, Primitive] = {adamw_p: adamw_many_p, sgd_p: sgd_many_p}


def square_sets(specs: Sequence[P]) -> dict[frozenset[str], list[int]]:
    """Positions of gradients by the mesh axes that shard them: their square sums are pending over those axes."""
    sets: dict[frozenset[str], list[int]] = {}
    for index, spec in enumerate(specs):
        sets.setdefault(spec.axes, []).append(index)
    return sets


def compile_squares(builder: "_Builder", unit: "_Unit", grads: list[int]) -> Code:
    """One vector of square sums for each distinct set of axes that shards gradients of `unit`."""
    specs = [builder.values[v].spec for v in grads]
    sets = list(square_sets(specs).values())

    def squares(values: list[Tensor]) -> list[Tensor]:
        return [torch.stack([sum_squares(values[i]) for i in positions]) for positions in sets]

    return builder._function("squares", squares, ([builder._global(v) for v in grads],), specs, None)


def compile_norm(builder: "_Builder", squares: list[int]) -> Code:
    """(norm, clip factor) from all vectors of square sums: one reduction for each distinct set of axes, then one order."""
    order: list[tuple[int, int]] = []  # (unit, leaf) of every element, as the vectors come
    sources: list[int] = []
    for number, unit in enumerate(builder.units.values()):
        for positions in square_sets(unit.grad).values():
            sources.append(number)
            order.extend((number, leaf) for leaf in positions)
    specs = [builder.values[v].spec for v in squares]
    by_spec: dict[P, list[int]] = {}
    for index, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(index)
    bounds = [0]
    for v in squares:
        bounds.append(bounds[-1] + builder.values[v].shape[0])
    grouped = [place for indices in by_spec.values() for i in indices for place in order[bounds[i] : bounds[i + 1]]]
    permutation = sorted(range(len(grouped)), key=grouped.__getitem__)

    def norm(vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
        together = torch.cat([torch.cat([vectors[i] for i in indices]) for indices in by_spec.values()])
        total = constrain(together, P())[torch.tensor(permutation)].sum().sqrt()
        return total, builder.optimizer.scale(total).to(torch.float64)

    likes = [builder._global(v) for v in squares]
    return compile_function("norm", norm, (likes,), builder.mesh, specs, [P(), P()], builder.strategy.compute)


def compile_update(builder: "_Builder", unit: "_Unit", grads: list[int]) -> Code:
    """The optimizer's rule for every parameter of `unit`, on the specs at which it and its state are stored."""
    optimizer, count = builder.optimizer, len(unit.leaves)
    decays = tuple(optimizer.decays(path, axes) for (path, _), axes in zip(unit.leaves, unit.axes, strict=True))
    owned = _owned(builder, [v for column in builder.final.values() for v in column])
    grad_specs = [builder.values[v].spec for v in grads]
    specs = [*unit.storage, *grad_specs, *unit.opt * len(optimizer.slots), P(), P(), P()]
    likes = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for _, leaf in unit.leaves]
    key = ("update", decays, owned, tuple((tuple(t.shape), t.dtype) for t in likes), tuple(specs))
    if key not in builder.cache:

        def update(params: list, grads: list, slots: list, lr: Tensor, step: Tensor, scale: Tensor) -> list[Tensor]:
            results = [
                optimizer.update_leaf(
                    params[i], grads[i], tuple(column[i] for column in slots), lr, step, scale, decays=decays[i]
                )
                for i in range(count)
            ]
            return [new for new, _ in results] + [new[s] for s in range(len(optimizer.slots)) for _, new in results]

        scalar = torch.empty((), dtype=torch.float64, device="meta")
        grad_likes = [builder._global(v) for v in grads]
        args = (likes, grad_likes, [likes] * len(optimizer.slots), scalar, scalar, scalar)
        targets = [*unit.storage, *unit.opt * len(optimizer.slots)]
        name = f"update {unit.path.split('.')[0]}"
        passes = (join_updates,) if owned else ()
        builder.cache[key] = compile_function(
            name, update, args, builder.mesh, specs, targets, builder.strategy.compute, passes=passes
        )
    return builder.cache[key]


@graph_pass
def join_updates(graph: fx.Graph) -> dict[str, int]:
    """Update many tensors in one call that overwrites them: the step gives its operands away.

    before:  %n = adamw(%p, %g, %m, %v, ...); %o = adamw(%q, %h, %k, %w, ...)
    after:   %j = adamw_many([%p, %q], [%g, %h], [%m, %k], [%v, %w], ...)
    """
    groups: dict[tuple, list[fx.Node]] = {}
    for node in graph.nodes:
        one = next((p for p in MANY if p.op == node.target), None)
        if one is None:
            continue
        num_lists = len(MANY[one].operands) - sum(name in ("lr", "step", "scale") for name in MANY[one].operands)
        lists, scalars = node.args[:num_lists], node.args[num_lists:]
        if all(n is not None and _overwritable(n) for n in lists):
            dtype = lists[0].meta["val"].dtype
            groups.setdefault((one.name, tuple(scalars), tuple(sorted(node.kwargs.items())), dtype), []).append(node)
    for (name, scalars, kwargs, _), nodes in groups.items():
        one = next(p for p in MANY if p.name == name)
        _join_update(graph, MANY[one], nodes, scalars, dict(kwargs))
    return {"updates_joined": sum(len(nodes) for nodes in groups.values())}


def _join_update(graph: fx.Graph, many: Primitive, nodes: list[fx.Node], scalars: tuple, kwargs: dict) -> None:
    num_lists = len(nodes[0].args) - len(scalars)
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max(nodes, key=order.__getitem__)
    with graph.inserting_after(last):
        joined = graph.call_function(many.op, (*([n.args[i] for n in nodes] for i in range(num_lists)), *scalars), kwargs)
    joined.meta = {
        "val": many.op(*fx.node.map_arg(joined.args, lambda n: n.meta["val"]), **kwargs),
        "spec": None,
        "line": "",
        "labels": (),
    }
    at = joined
    for result in range(len(many.results)):
        with graph.inserting_after(at):
            column = graph.call_function(operator.getitem, (joined, result))
        column.meta = {"val": joined.meta["val"][result], "spec": None, "line": "", "labels": ()}
        at = column
        for position, node in enumerate(nodes):
            old = next((user for user in node.users if user.target is operator.getitem and user.args[1] == result), None)
            if old is None:
                continue
            with graph.inserting_after(at):
                part = graph.call_function(operator.getitem, (column, position))
            part.meta = dict(old.meta) | {"val": joined.meta["val"][result][position]}
            at = part
            old.replace_all_uses_with(part)
            graph.erase_node(old)


def _overwritable(node: fx.Node) -> bool:
    return node.meta["val"].is_contiguous()


def _owned(builder: "_Builder", grads: list[int]) -> bool:
    """Whether no two gradients overlap and none lies in a parameter: what one update writes, no other reads."""
    params = {builder.values[v].storage for column in builder.params.values() for v in column}
    spans = sorted((v.storage, v.offset, v.offset + v.bytes // v.dtype.itemsize) for v in (builder.values[g] for g in grads))
    apart = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    return apart and not any(storage in params for storage, _, _ in spans)
