"""Exchange: gradients of parameters that several positions along pp hold, such as tied embeddings, go to all of their holders."""

from dataclasses import dataclass

import torch

from mpar.mesh import Mesh
from mpar.precision import Precision
from mpar.compiler.build._gathers import use_name
from mpar.compiler.build._units import Unit
from mpar.compiler.build._writer import Writer
from mpar.spec import local_shape

__all__ = ["SharedUses", "exchange_gradients"]


@dataclass(frozen=True)
class SharedUses:
    """units: those that several positions hold, by path. uses: (segment, copy, position) of each use, in the order of addition.

    first_message: the number of the first message that brings gradients of these.
    """

    units: dict[str, Unit]
    uses: dict[str, list[tuple[int, int, int]]]
    first_message: int


def exchange_gradients(
    writer: Writer, mesh: Mesh, precision: Precision, position: int, shared: SharedUses, own: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Send the uses in `own` to the other holders and receive theirs, by name; messages are numbered and posted in one order."""
    brought: dict[str, list[int]] = {}
    waits: list[tuple[int, int, int, str]] = []
    number = shared.first_message
    for path, unit in shared.units.items():
        holders = list(dict.fromkeys(at for _, _, at in shared.uses[path]))
        for index, copy, source in shared.uses[path]:
            use = use_name(path, index, copy)
            for target in (holder for holder in holders if holder != source):
                for leaf, (leaf_path, x) in enumerate(unit.leaves):
                    if position == source:
                        value = own[use][leaf]
                        writer.send(value, number, target, path, -1, f"->{target} G")
                        waits.append((value, number, target, path))
                    elif position == target:
                        shape = local_shape(tuple(x.shape), unit.grad[leaf], mesh)
                        like = torch.empty(shape, dtype=precision.grad_dtype(x.dtype), device="meta")
                        name, queue = f"g {leaf_path}@{index}", f"<-{source} G"
                        value = writer.receive(name, like, unit.grad[leaf], number, source, path, -1, queue)
                        brought.setdefault(use, []).append(value)
                        waits.append((value, number, source, path))
                    number += 1
    for value, message, peer, path in waits:
        writer.wait(value, message, peer, path, -1)
    return brought
