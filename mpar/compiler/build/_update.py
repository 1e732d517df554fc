"""The update: the optimizer's rule for every parameter that is trained, on the specs at which it and its slots are stored."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mpar.compiler.build._boundary import Boundary
from mpar.compiler.build._join_updates import join_updates
from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit
from mpar.compiler.build._writer import Writer
from mpar.compiler.segment import Code
from mpar.optimizer import Optimizer, decays, leaf_rule, updated
from mpar.spec import P

__all__ = ["write_updates"]

SetFrom = tuple[int, Callable[[Tensor, Tensor], Tensor]]
"""How a parameter is set without a gradient: the value of a metric, and `fn(parameter, metric)` for the new parameter."""


def write_updates(
    position: Position,
    writer: Writer,
    boundary: Boundary,
    grads: Mapping[str, list[int]],
    scalars: tuple[int, int, int, int],
    reported: Mapping[str, int],
) -> dict[str, int]:
    """Write the update of each unit; returns the values of the new state by path. What is frozen has no new value.

    grads:    for each unit, the finished gradients of those of its parameters that are trained.
    scalars:  the values of the learning rate, of the number of the update, of the factor by which gradients are multiplied, and
              of whether the update is skipped: then the new state has the bits of the old one.
    reported: the values of metrics by name. Parameters that the chain names in `updates` are set from these, not by gradients.
    """
    blueprint, optimizer = position.blueprint, position.blueprint.optimizer
    assert optimizer is not None
    updates, frozen = blueprint.model.updates, blueprint.model.frozen
    set_from = {path: (reported[metric], fn) for path, (metric, fn) in updates.items() if path not in frozen}
    overwrite = _overwritable(
        writer,
        [v for of_unit in grads.values() for v in of_unit],
        [v for path in position.units for v in boundary.params[path]],
    )
    new: dict[str, int] = {}
    for path, all_of_unit in position.units.items():
        changed = [i for i, p in enumerate(all_of_unit.paths) if i in all_of_unit.trained or p in set_from]
        if not changed:
            continue
        unit = all_of_unit.only(changed)
        rules = {i: set_from[p] for i, p in enumerate(unit.paths) if p in set_from}
        of_unit, slots = grads.get(path, []), boundary.slots[path]
        code = _update_code(writer, optimizer, unit, of_unit, rules, overwrite=overwrite)
        inputs = [*(boundary.params[path][i] for i in changed), *of_unit, *(v for slot in slots for v in slot), *scalars]
        inputs += [value for value, _ in rules.values()]
        names = [f"params.{p}" for p in unit.paths]
        names += [f"opt.{slot}.{unit.paths[i]}" for slot in optimizer.slots for i in unit.with_slot(optimizer, slot)]
        new |= dict(zip(names, writer.emit("update", code, inputs, names, unit.path), strict=True))
    return new


def _update_code(
    writer: Writer, optimizer: Optimizer, unit: Unit, grads: list[int], rules: Mapping[int, SetFrom], *, overwrite: bool
) -> Code:
    """The code of the update of a unit.

    grads:     the gradients of its trained parameters.
    rules:     how parameters are set from a metric, by their index in the unit; these have no gradient and no slots.
    overwrite: whether the new values may be written over the old ones; if not, they are written over copies of these. One of
               several positions that hold a parameter may have to do that; the same kernel then runs there as at the others,
               so the parameter keeps the same bits everywhere.
    """
    decay = tuple(decays(optimizer, path, axes) for path, axes in zip(unit.paths, unit.axes, strict=True))
    leaf_rules = tuple(leaf_rule(optimizer, path, axes) for path, axes in zip(unit.paths, unit.axes, strict=True))
    holders = {slot: unit.with_slot(optimizer, slot) for slot in optimizer.slots}

    def update(
        params: list, grads: list, slots: dict, lr: Tensor, step: Tensor, scale: Tensor, skip: Tensor, given: list
    ) -> list[Tensor]:
        values, grad_of = dict(zip(rules, given, strict=True)), dict(zip(unit.trained, grads, strict=True))
        results: list[list[Tensor]] = []  # for each parameter, its new value and those of its slots
        for i, p in enumerate(params):
            p = p if overwrite else p.clone()
            if i in rules:
                results.append([torch.where(skip, p, rules[i][1](p, values[i]))])
                continue
            g, of_leaf = grad_of[i], [dict(zip(holders[name], slots[name], strict=True))[i] for name in leaf_rules[i].slots]
            if not overwrite:
                g, of_leaf = g.clone(), [slot.clone() for slot in of_leaf]
            old = (p, *of_leaf)
            new = updated(optimizer, leaf_rules[i], unit.paths[i], old, g, lr, step, scale, decays=decay[i])
            results.append([torch.where(skip, before, after) for before, after in zip(old, (new[0], *new[1]), strict=True)])
        all_slots = [results[i][1 + leaf_rules[i].slots.index(name)] for name, indices in holders.items() for i in indices]
        return [result[0] for result in results] + all_slots

    leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for _, leaf in unit.leaves]
    scalars = [*[torch.empty((), dtype=torch.float64, device="meta")] * 3, torch.empty((), dtype=torch.bool, device="meta")]
    given = [value for value, _ in rules.values()]
    values = writer.values
    stored = {slot: [unit.slot(optimizer, slot, i) for i in indices] for slot, indices in holders.items()}
    slot_leaves = {slot: [leaf for leaf, _ in of_slot] for slot, of_slot in stored.items()}
    slot_specs = [spec for of_slot in stored.values() for _, spec in of_slot]
    specs = [*unit.storage, *values.specs(grads), *slot_specs, *[P()] * len(scalars), *values.specs(given)]
    mask = "".join("-d"[answer] for answer in decay)
    name = f"update {unit.path.split('.')[0]}" + (f" [{mask}]" if len(set(decay)) > 1 or not all(decay) else "")
    args = (leaves, values.globals(grads), slot_leaves, *scalars, values.globals(given))
    targets = [*unit.storage, *slot_specs]
    different_rules = () if all(rule is optimizer for rule in leaf_rules) else leaf_rules
    variant = (different_rules, tuple(unit.trained), *((i, fn) for i, (_, fn) in rules.items()))
    return writer.functions.compile(name, update, args, specs, targets, (*variant, overwrite), (join_updates,))


def _overwritable(writer: Writer, grads: Sequence[int], params: Sequence[int]) -> bool:
    """Whether every update may write over its operands without changing what another update reads.

    That is so if no two gradients overlap in memory, and none lies in the storage of a parameter.
    """
    stored = {writer.values[v].storage for v in params}
    spans = sorted((v.storage, v.offset, v.offset + v.bytes // v.dtype.itemsize) for v in (writer.values[g] for g in grads))
    do_not_overlap = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    return do_not_overlap and not any(storage in stored for storage, _, _ in spans)
