"""Exchange: the finished gradient of each trained parameter of a part is the sum over all segments that use it, in chain order.

If several positions along pp hold a parameter, such as a tied embedding, each first sends its gradients to the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mpar.compiler.build._gradients import Gradients, use_name
from mpar.compiler.build._position import Position
from mpar.compiler.build._units import Unit
from mpar.compiler.build._writer import Writer
from mpar.schedules import Transfer
from mpar.spec import local_shape

__all__ = ["finished_gradients"]


def finished_gradients(position: Position, writer: Writer, gradients: Gradients) -> dict[str, list[int]]:
    """The finished gradients of each unit: the sum over its uses in chain order, including those at other positions."""
    pipeline = position.blueprint.pipeline
    uses = {path: pipeline.uses(unit.users) for path, unit in position.trained_units.items()}
    names = [
        use_name(path, index, copy) for path, of_unit in uses.items() for index, copy, at in of_unit if at == position.number
    ]
    by_use = {name: gradients.take_reduced(name) for name in names}
    by_use |= _exchange(position, writer, by_use)
    finished = {}
    for path, unit in position.trained_units.items():
        total, *others = (by_use[use_name(path, index, copy)] for index, copy, _ in uses[path])
        for other in others:
            total = writer.add(total, other, [f"g {p}" for p in unit.paths], path)
        finished[path] = total
    return finished


@dataclass(frozen=True)
class _Gradient:
    """A gradient that position `source` along pp sends to position `target` in message `number`.

    It is the gradient of leaf `leaf` of a unit from one use of the unit, by segment `segment`.
    """

    unit: Unit
    use: str
    segment: int
    leaf: int
    source: int
    target: int
    number: int


def _exchange(position: Position, writer: Writer, reduced: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Send the gradients in `reduced`, by use, to the other holders of the parameter; returns theirs, by use.

    All positions post their messages in the same order.
    """
    blueprint = position.blueprint
    received: dict[str, list[int]] = {}
    waits: list[tuple[int, int, int, str]] = []
    for gradient in _shared(position):
        unit, path, number = gradient.unit, gradient.unit.path, gradient.number
        if position.number == gradient.source:
            value = reduced[gradient.use][gradient.leaf]
            writer.send(value, number, gradient.target, "G", path, None)
            waits.append((value, number, gradient.target, path))
        elif position.number == gradient.target:
            (leaf_path, x), spec = unit.leaves[gradient.leaf], unit.grad[gradient.leaf]
            shape = local_shape(tuple(x.shape), spec, blueprint.placement.mesh)
            local = torch.empty(shape, dtype=blueprint.placement.precision.grad_dtype(x.dtype), device="meta")
            name = f"g {leaf_path}@{gradient.segment}"
            value = writer.receive(name, local, spec, number, gradient.source, "G", path, None)
            received.setdefault(gradient.use, []).append(value)
            waits.append((value, number, gradient.source, path))
    for value, message, peer, path in waits:
        writer.wait(value, message, peer, path, None)
    return received


def _shared(position: Position) -> list[_Gradient]:
    """Every gradient that any position along pp sends; their message numbers follow those of the schedule's messages."""
    blueprint = position.blueprint
    numbers = (item.message for items in blueprint.pipeline.entries for item in items if isinstance(item, Transfer))
    number = (max(numbers, default=-1) + 1) * blueprint.messages_per_edge
    gradients: list[_Gradient] = []
    for path, unit in blueprint.trained_units.items():
        holders = position.holders(unit)
        for segment, copy, source in blueprint.pipeline.uses(unit.users) if len(holders) > 1 else ():
            use = use_name(path, segment, copy)
            for target in (holder for holder in holders if holder != source):
                for leaf in range(len(unit.leaves)):
                    gradients.append(_Gradient(unit, use, segment, leaf, source, target, number + len(gradients)))
    return gradients
