"""Units: the parameters at one path of the chain, which are stored, gathered, reduced and updated together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes, Chain
from mpar.mesh import Mesh
from mpar.optimizer import Optimizer, leaf_rule, slot_dims
from mpar.precision import Precision
from mpar.spec import P
from mpar.strategy import Strategy

__all__ = ["Unit", "group_of", "group_units", "kind_name", "make_units", "span"]


@dataclass
class Unit:
    """The parameters at one path of a segment; all lists but `users` have an entry for each of them.

    leaves:             the path of the parameter, and a global tensor without data.
    axes:               its logical axes.
    compute, compute_dtypes: its spec and dtype while it is used.
    storage, grad:      the specs at which the parameter and its gradient are stored.
    slot_spec:          gives the spec at which a slot of the optimizer with some logical axes is stored.
    users:              the numbers of the segments that read the unit.
    trained:            the indices of the parameters that have a gradient: those that are neither frozen nor set by `updates`.
    """

    path: str
    leaves: list[tuple[str, Tensor]]
    axes: list[Axes]
    compute: list[P]
    compute_dtypes: list[torch.dtype]
    storage: list[P]
    grad: list[P]
    slot_spec: Callable[[Axes], P]
    users: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """The path of each parameter."""
        return [path for path, _ in self.leaves]

    def only(self, indices: Sequence[int]) -> "Unit":
        """The unit with only these of its parameters."""
        return replace(
            self,
            leaves=[self.leaves[i] for i in indices],
            axes=[self.axes[i] for i in indices],
            compute=[self.compute[i] for i in indices],
            compute_dtypes=[self.compute_dtypes[i] for i in indices],
            storage=[self.storage[i] for i in indices],
            grad=[self.grad[i] for i in indices],
            trained=[place for place, i in enumerate(indices) if i in self.trained],
        )

    def with_slot(self, optimizer: Optimizer, slot: str) -> list[int]:
        """The indices of the trained parameters that have this slot of the optimizer."""
        return [i for i in self.trained if slot in leaf_rule(optimizer, self.paths[i], self.axes[i]).slots]

    def slot(self, optimizer: Optimizer, slot: str, index: int) -> tuple[Tensor, P]:
        """A slot of the parameter at `index`: a global tensor without data, and the spec at which it is stored."""
        path, leaf = self.leaves[index]
        dims = slot_dims(leaf_rule(optimizer, path, self.axes[index]), slot, leaf.ndim)
        axes = tuple(self.axes[index][dim] if dim not in dims[:place] else None for place, dim in enumerate(dims))
        return torch.empty([leaf.shape[dim] for dim in dims], dtype=leaf.dtype, device="meta"), self.slot_spec(axes)

    @property
    def needs_gather(self) -> bool:
        """Whether its parameters are used with another spec or dtype than they are stored with."""
        same = all(dtype == leaf.dtype for dtype, (_, leaf) in zip(self.compute_dtypes, self.leaves, strict=True))
        return self.compute != self.storage or not same

    @property
    def bytes(self) -> int:
        """The bytes of its global parameters, in the dtypes in which they are stored."""
        return sum(leaf.nbytes for _, leaf in self.leaves)


def make_units(model: Chain, strategy: Strategy, mesh: Mesh, precision: Precision) -> dict[str, Unit]:
    """The units of a model by path, in the order of their first use."""
    units: dict[str, Unit] = {}
    for index, segment in enumerate(model.segments):
        for path in segment.paths:
            if path not in units:
                units[path] = _make_unit(model, path, strategy, mesh, precision)
            units[path].users.append(index)
    return units


def _make_unit(model: Chain, path: str, strategy: Strategy, mesh: Mesh, precision: Precision) -> Unit:
    subtree = tree.leaves_with_path(tree.get(model.abstract_params, path))
    leaves = [(f"{path}.{sub}" if sub else path, leaf) for sub, leaf in subtree]
    compute_dtypes = [precision.compute_dtype(p, leaf.dtype) for p, leaf in leaves]
    leaves = [
        (p, leaf.new_empty(leaf.shape, dtype=dtype) if p in model.frozen else leaf)  # what nothing updates needs no wider copy
        for (p, leaf), dtype in zip(leaves, compute_dtypes, strict=True)
    ]
    axes = [tuple(tree.get(model.param_axes, leaf_path)) for leaf_path, _ in leaves]
    return Unit(
        path,
        leaves,
        axes,
        [strategy.compute_spec(a, mesh) for a in axes],
        compute_dtypes,
        [strategy.storage_spec(a, "param", mesh) for a in axes],
        [strategy.storage_spec(a, "grad", mesh) for a in axes],
        lambda a: strategy.storage_spec(a, "opt", mesh),
        trained=[i for i, (p, _) in enumerate(leaves) if p not in model.frozen and p not in model.updates],
    )


def group_units(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Divide units into groups of neighbours, each of at most `bucket_bytes` in all.

    A larger unit is alone. So is one that several segments read, because it would keep its neighbours gathered as long as itself.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        alone = len(unit.users) > 1 or (groups and len(groups[-1][-1].users) > 1)
        if groups and not alone and sum(u.bytes for u in groups[-1]) + unit.bytes <= bucket_bytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def group_of(groups: Mapping[int, list[list[Unit]]]) -> dict[tuple[int, str], list[Unit]]:
    """For each stage and path, the group that the unit belongs to; `groups` has the groups of each stage."""
    return {(stage, unit.path): group for stage, of_stage in groups.items() for group in of_stage for unit in group}


def kind_name(units: Sequence[Unit]) -> str:
    """The first parts of the units' paths, by which kinds are named: `embed+layers`."""
    return "+".join(dict.fromkeys(unit.path.split(".")[0] for unit in units))


def span(units: Sequence[Unit]) -> str:
    """The place of the units in the chain: `layers.0..layers.3`."""
    return units[0].path if len(units) == 1 else f"{units[0].path}..{units[-1].path}"
