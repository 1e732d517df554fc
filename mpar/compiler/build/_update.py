"""The update: the optimizer's rule for every parameter, on the specs at which the parameter and its slots are stored."""

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
    """Write the update of each unit; returns the values of the new state by path.

    grads:    for each unit, the finished gradients.
    scalars:  the values of the learning rate, of the number of the update, of the factor by which gradients are multiplied, and
              of whether the update is skipped: then the new state has the bits of the old one.
    reported: the values of metrics by name. Parameters that the chain names in `updates` are set from these, not by gradients.
    """
    blueprint, optimizer = position.blueprint, position.blueprint.optimizer
    assert optimizer is not None
    units = list(position.units.values())
    set_from = {path: (reported[metric], fn) for path, (metric, fn) in blueprint.model.updates.items()}
    overwrite = _overwritable(
        writer, [v for unit in units for v in grads[unit.path]], [v for unit in units for v in boundary.params[unit.path]]
    )
    new: dict[str, int] = {}
    for unit in units:
        slots = boundary.slots[unit.path]
        rules = {i: set_from[path] for i, path in enumerate(unit.paths) if path in set_from}
        code = _update_code(writer, optimizer, unit, grads[unit.path], rules, overwrite=overwrite)
        inputs = [*boundary.params[unit.path], *grads[unit.path], *(v for slot in slots for v in slot), *scalars]
        inputs += [value for value, _ in rules.values()]
        names = [f"params.{path}" for path in unit.paths]
        names += [f"opt.{slot}.{unit.paths[i]}" for slot in optimizer.slots for i in unit.with_slot(optimizer, slot)]
        new |= dict(zip(names, writer.emit("update", code, inputs, names, unit.path), strict=True))
    return new


def _update_code(
    writer: Writer, optimizer: Optimizer, unit: Unit, grads: list[int], rules: Mapping[int, SetFrom], *, overwrite: bool
) -> Code:
    """The code of the update of a unit.

    rules:     how parameters are set from a metric, by their index in the unit; the slots of these parameters do not change.
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
        values, results = dict(zip(rules, given, strict=True)), []
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            of_leaf = tuple(dict(zip(holders[name], slots[name], strict=True))[i] for name in leaf_rules[i].slots)
            if not overwrite:
                p, g, of_leaf = p.clone(), g.clone(), tuple(slot.clone() for slot in of_leaf)
            if i in rules:
                results.append((torch.where(skip, p, rules[i][1](p, values[i])), of_leaf))
                continue
            old = (p, *of_leaf)
            new_p, new_slots = updated(optimizer, leaf_rules[i], unit.paths[i], old, g, lr, step, scale, decays=decay[i])
            kept = [torch.where(skip, before, new) for before, new in zip(old, (new_p, *new_slots), strict=True)]
            results.append((kept[0], tuple(kept[1:])))
        all_slots = [results[i][1][leaf_rules[i].slots.index(name)] for name, indices in holders.items() for i in indices]
        return [new for new, _ in results] + all_slots

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
    variant = (different_rules, *((i, fn) for i, (_, fn) in rules.items()))
    return writer.functions.compile(name, update, args, specs, targets, (*variant, overwrite), (join_updates,))


def _overwritable(writer: Writer, grads: Sequence[int], params: Sequence[int]) -> bool:
    """Whether every update may write over its operands without changing what another update reads.

    That is so if no two gradients overlap in memory, and none lies in the storage of a parameter.
    """
    stored = {writer.values[v].storage for v in params}
    spans = sorted((v.storage, v.offset, v.offset + v.bytes // v.dtype.itemsize) for v in (writer.values[g] for g in grads))
    do_not_overlap = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    return do_not_overlap and not any(storage in stored for storage, _, _ in spans)
