"""The end of a step as segments: square sums of gradients, the global norm, and the optimizer's rule on storage specs."""

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpar.ops import PRIMITIVES, Primitive, constrain, sum_squares
from mpar.program._segments import Code
from mpar.program._units import Unit
from mpar.program._writer import Writer
from mpar.sharding import graph_pass
from mpar.spec import P

__all__ = ["join_updates", "write_norm", "write_updates"]

MANY: dict[Primitive, Primitive] = {PRIMITIVES[name]: PRIMITIVES[f"{name}_many"] for name in ("adamw", "sgd")}
ByUnit = Mapping[str, list[int]]


def write_norm(
    writer: Writer, optimizer: Any, units: Sequence[Unit], owned: Collection[str], grads: ByUnit, dtype: torch.dtype
) -> tuple[int, int]:
    """`(global norm, clip factor)` of the gradients of all units; this part contributes those in `owned`. `dtype`: of squares."""
    squares: list[int] = []
    mine = [unit for unit in units if unit.path in owned]
    for unit in mine:
        code = _square_code(writer, grads[unit.path])
        squares += writer.emit("norm", code, grads[unit.path], [f"squares {unit.path}"] * len(code.out_specs), unit.path)
    chain_order = [(unit.path, leaf) for unit in units for leaf in range(len(unit.leaves))]
    vectors = [[(unit.path, leaf) for leaf in positions] for unit in mine for positions in _square_sets(unit.grad)]
    vector = writer.spread("all squares", squares, vectors, chain_order, dtype, op="norm")

    def norm(squares: Tensor) -> tuple[Tensor, Tensor]:
        total = constrain(squares, P()).sum().sqrt()
        return total, optimizer.scale(total).to(torch.float64)

    code = writer.function("norm", norm, tuple(writer.globals([vector])), writer.specs([vector]), [P(), P()])
    total, scale = writer.emit("norm", code, [vector], ["grad_norm", "scale"])
    return total, scale


def write_updates(
    writer: Writer,
    optimizer: Any,
    units: Sequence[Unit],
    params: ByUnit,
    grads: ByUnit,
    slots: Mapping[str, list[list[int]]],
    lr: int,
    step: int,
    scale: int,
    set_from: Mapping[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]],
) -> dict[str, int]:
    """The new state by path, unit by unit. Parameters in `set_from` follow no gradient: they become `fn(parameter, value)`."""
    owned = _overwritable(
        writer, [v for unit in units for v in grads[unit.path]], [v for unit in units for v in params[unit.path]]
    )
    new: dict[str, int] = {}
    for unit in units:
        columns = slots[unit.path]
        rules = {i: set_from[path] for i, path in enumerate(unit.paths) if path in set_from}
        code = _update_code(writer, optimizer, unit, grads[unit.path], owned, rules)
        inputs = [*params[unit.path], *grads[unit.path], *(v for column in columns for v in column), lr, step, scale]
        inputs += [value for value, _ in rules.values()]
        names = [*(f"params.{p}" for p in unit.paths), *(f"opt.{slot}.{p}" for slot in optimizer.slots for p in unit.paths)]
        new |= dict(zip(names, writer.emit("update", code, inputs, names, unit.path), strict=True))
    return new


def _square_sets(specs: Sequence[P]) -> list[list[int]]:
    """Positions of gradients by the mesh axes that shard them: their square sums are pending over those axes."""
    sets: dict[frozenset[str], list[int]] = {}
    for index, spec in enumerate(specs):
        sets.setdefault(spec.axes, []).append(index)
    return list(sets.values())


def _square_code(writer: Writer, grads: list[int]) -> Code:
    """One vector of square sums for each distinct set of axes that shards gradients of a unit."""
    specs = writer.specs(grads)
    sets = _square_sets(specs)

    def squares(values: list[Tensor]) -> list[Tensor]:
        return [torch.stack([sum_squares(values[i]) for i in positions]) for positions in sets]

    return writer.function("squares", squares, (writer.globals(grads),), specs, None)


def _update_code(
    writer: Writer, optimizer: Any, unit: Unit, grads: list[int], owned: bool, rules: Mapping[int, tuple[int, Callable]]
) -> Code:
    """The optimizer's rule for every parameter of `unit`, on the specs at which it and its state are stored.

    rules: by position, the parameters that are set from a value by a function of their own; their slots stay as they are.
    """
    decays = tuple(optimizer.decays(path, axes) for path, axes in zip(unit.paths, unit.axes, strict=True))
    num_slots = len(optimizer.slots)

    def update(params: list, grads: list, slots: list, lr: Tensor, step: Tensor, scale: Tensor, given: list) -> list[Tensor]:
        values, results = dict(zip(rules, given, strict=True)), []
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            own = tuple(column[i] for column in slots)
            if i in rules:
                results.append((rules[i][1](p, values[i]), own))
            else:
                results.append(optimizer.update_leaf(p, g, own, lr, step, scale, decays=decays[i]))
        return [new for new, _ in results] + [own[slot] for slot in range(num_slots) for _, own in results]

    leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for _, leaf in unit.leaves]
    scalars = [torch.empty((), dtype=torch.float64, device="meta")] * 3
    given = [value for value, _ in rules.values()]
    specs = [*unit.storage, *writer.specs(grads), *unit.opt * num_slots, P(), P(), P(), *writer.specs(given)]
    mask = "".join("-d"[decay] for decay in decays)
    name = f"update {unit.path.split('.')[0]}" + (f" [{mask}]" if len(set(decays)) > 1 or not all(decays) else "")
    args = (leaves, writer.globals(grads), [leaves] * num_slots, *scalars, writer.globals(given))
    targets = [*unit.storage, *unit.opt * num_slots]
    variant = tuple((i, fn) for i, (_, fn) in rules.items())
    return writer.function(name, update, args, specs, targets, variant, passes=(join_updates,) if owned else ())


def _overwritable(writer: Writer, grads: Sequence[int], params: Sequence[int]) -> bool:
    """Whether no two gradients overlap and none lies in a parameter: what one update writes, no other reads."""
    stored = {writer.values[v].storage for v in params}
    spans = sorted((v.storage, v.offset, v.offset + v.bytes // v.dtype.itemsize) for v in (writer.values[g] for g in grads))
    apart = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    return apart and not any(storage in stored for storage, _, _ in spans)


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
        num_lists = MANY[one].operands.index("lr")  # then come the scalars
        lists, scalars = node.args[:num_lists], node.args[num_lists:]
        if all(n is not None and n.meta["val"].is_contiguous() for n in lists):
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
        lists = ([n.args[i] for n in nodes] for i in range(num_lists))
        left_out: list[list[fx.Node]] = [[] for _ in many.operands[len(nodes[0].args) :]]  # lists that only the joined op has
        joined = graph.call_function(many.op, (*lists, *scalars, *left_out), kwargs)
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
