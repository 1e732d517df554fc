"""Strategy: tables from logical axis names to mesh axes, one for compute and one each for stored parameters, gradients and
optimizer state. Data, tensor and sequence parallelism and ZeRO-0..3 are rows of these tables.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpar import tree
from mpar.chain import is_axes
from mpar.errors import ShardingError, UnknownNameError
from mpar.mesh import Mesh
from mpar.spec import P, check_spec
from mpar.tree import Tree

__all__ = ["PRESETS", "AxisTable", "Strategy", "dim_sizes", "preset", "spec_from_axes"]

AxisTable = Mapping[str, tuple[str, ...]]
MESH_AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""The mesh axes that mpar's own strategies name. A mesh need not have all of them: those that it has not are of size 1."""

_COMPUTE: dict[str, tuple[str, ...]] = {
    "batch": ("dp", "fsdp"),
    "seq": ("cp",),
    "residual_seq": ("cp",),
    "embed": (),
    "heads": (),
    "kv_heads": (),
    "head": (),
    "mlp": (),
    "vocab": (),
    "attend_seq": ("cp",),
    "attend_kv_seq": ("cp",),
    "attend_heads": (),
    "attend_kv_heads": (),
    "pages": ("cp",),
    "moe_batch": ("dp", "fsdp"),
    "moe_seq": ("cp",),
    "expert": (),
    "expert_mlp": (),
}
KEEP_ORDER = ("attend_heads", "attend_kv_heads")
"""Rows whose mesh axes are used in the order of the row, not in that of the mesh: the last of them divide a part of a sequence by
heads."""


@dataclass(frozen=True)
class Strategy:
    """How every tensor is sharded, while it is used and while it is stored.

    compute:       the mesh axes that shard activations, and parameters while they are used.
    param_storage: the mesh axes that shard a stored parameter further; grad_storage and opt_storage say it for gradients and
                   optimizer state. A mesh axis that already shards a tensor by the compute table is not used twice.
    reduce:        "each": gradients are reduced after every microbatch and added to a sharded sum; "last": they are added before
                   reduction, and the sum is reduced once. None: "each" if gradient storage is sharded, else "last".
    gather:        "drop": gathered parameters are dropped after the forward and gathered again for the backward; "keep": they
                   are gathered once.
    partial_ok:    logical axes whose size need not be divisible by that of a mesh axis: the largest outer part of the mesh axis
                   that divides it shards the dim, and along the inner part the tensor is replicated.

    The following fields become rows of `compute` when the model and the mesh are known, see `mpar/arrange.py`:

    context_parallel: how attention divides a sequence that the mesh shards: auto | ring | all_gather | all_to_all |
                      all_to_all+ring; None: as the rows attend_* of `compute` say. ulysses_size: the number of ranks that divide
                      attention by heads, each group with an all-to-all.
    sequence:         auto | zigzag | contiguous: which positions of a sequence a rank has.
    expert_parallel:  the number of ranks over which the experts of a layer are spread; expert_axes: the mesh axes to use for it,
                      in order of preference.
    dispatcher:       all_to_all: rows travel to the rank of their expert; all_gather: each of these ranks gets all tokens.
    expert_tensor_parallel: whether the weights inside an expert are sharded like those of other feed-forward networks.
    """

    name: str
    compute: AxisTable
    param_storage: AxisTable = field(default_factory=dict)
    grad_storage: AxisTable = field(default_factory=dict)
    opt_storage: AxisTable = field(default_factory=dict)
    reduce: str | None = None
    partial_ok: tuple[str, ...] = ("kv_heads", "attend_kv_heads")
    gather: str = "drop"
    context_parallel: str | None = "auto"
    ulysses_size: int | None = None
    sequence: str = "auto"
    expert_parallel: int = 1
    expert_axes: tuple[str, ...] = ()
    dispatcher: str = "all_to_all"
    expert_tensor_parallel: bool = True

    def __post_init__(self) -> None:
        if self.reduce not in (None, "each", "last"):
            raise UnknownNameError(f"strategy {self.name!r}: reduce is {self.reduce!r}; it is 'each', 'last' or None")
        tables = (self.param_storage, self.grad_storage, self.opt_storage)
        rows = [(name, axes) for table in (self.compute, *tables) for name, axes in table.items()]
        wrong = [f"{name!r}: {axes!r}" for name, axes in rows if not isinstance(axes, tuple) or len({*axes}) < len(axes)]
        if wrong:
            raise ShardingError(
                f"strategy {self.name!r} has rows that are no tuples of different mesh axes: {', '.join(wrong)}.\n"
                "A row with one axis is written with a comma, such as ('tp',)."
            )
        unknown = sorted({name for table in tables for name in table} - set(self.compute))
        if unknown:
            raise UnknownNameError(
                f"strategy {self.name!r}: its storage tables have rows for {unknown}; logical axes are {sorted(self.compute)}"
            )
        if self.gather not in ("drop", "keep"):
            raise UnknownNameError(f"strategy {self.name!r}: gather is {self.gather!r}; it is 'drop' or 'keep'")

    def __hash__(self) -> int:
        tables = (self.compute, self.param_storage, self.grad_storage, self.opt_storage)
        words = (self.name, self.reduce, self.gather, self.context_parallel, self.sequence, self.expert_parallel, self.dispatcher)
        return hash((*words, *(tuple(sorted(table.items())) for table in tables)))

    def check_axes(self, mesh: Mesh) -> None:
        """Raise UnknownNameError if a table names a mesh axis that neither this mesh nor any strategy of mpar has."""
        known = {*mesh.axes, *MESH_AXES}
        tables = (self.compute, self.param_storage, self.grad_storage, self.opt_storage)
        unknown = sorted({axis for table in tables for axes in table.values() for axis in axes} - known)
        if unknown:
            raise UnknownNameError(f"strategy {self.name!r}: no mesh axis is called {unknown}; {mesh} has {sorted(known)}")

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced every microbatch."""
        return self.reduce == "each" or (self.reduce is None and bool(self.grad_storage))

    def compute_spec(self, axes: Sequence[str | None], mesh: Mesh) -> P:
        """The spec of a tensor with these logical axes while it is used."""
        return spec_from_axes(axes, self.compute, mesh)

    def storage_spec(self, axes: Sequence[str | None], kind: str, mesh: Mesh) -> P:
        """The spec of what is stored for a parameter with these logical axes; `kind` is "param", "grad" or "opt"."""
        table: AxisTable = getattr(self, f"{kind}_storage")
        compute = self.compute_spec(axes, mesh)
        used, dims = set(compute.axes), []
        for axis, dim in zip(axes, compute.padded(len(axes)), strict=True):
            extra = [a for a in table.get(axis or "", ()) if a not in used and mesh.axis_size(a) > 1]
            used.update(extra)
            dims.append(mesh.ordered({*dim, *extra}))
        return P(*dims)

    def refine(self, mesh: Mesh, sizes: Mapping[str, int]) -> tuple["Strategy", Mesh]:
        """Split mesh axes so that every logical axis of `partial_ok` is sharded as far as its size, in `sizes`, permits.

        With 2 kv heads on tp=4 the mesh becomes tp_outer=2, tp_inner=2: kv heads are sharded over the outer half.
        """
        strategy = self
        for name in (name for name in self.partial_ok if name in sizes):
            remaining, kept = sizes[name], []
            for axis in strategy.compute.get(name, ()):
                size, outer = mesh.axis_size(axis), math.gcd(remaining, mesh.axis_size(axis))
                if 1 < outer < size:
                    strategy, mesh = strategy.split(mesh, axis, outer)
                if outer > 1:
                    kept.append(axis if outer == size else f"{axis}_outer")
                remaining //= outer
                if outer < size:
                    break  # the following mesh axes are minor to one that replicates, so they cannot shard this dim
            if len(kept) < len(strategy.compute.get(name, ())):
                strategy = replace(strategy, compute={**strategy.compute, name: tuple(kept)})
        return strategy, mesh

    def split(self, mesh: Mesh, axis: str, outer: int) -> tuple["Strategy", Mesh]:
        """Split a mesh axis into `<axis>_outer`, of size `outer`, and `<axis>_inner`; rows that name it then name both."""
        return self._renamed(axis, (f"{axis}_outer", f"{axis}_inner")), mesh.split(axis, outer)

    def _renamed(self, axis: str, parts: tuple[str, ...]) -> "Strategy":
        def table(old: AxisTable) -> AxisTable:
            return {name: tuple(p for a in axes for p in (parts if a == axis else (a,))) for name, axes in old.items()}

        return replace(
            self,
            compute=table(self.compute),
            param_storage=table(self.param_storage),
            grad_storage=table(self.grad_storage),
            opt_storage=table(self.opt_storage),
        )

    def check(
        self, mesh: Mesh, shapes: Tree, axes: Tree, batch: Mapping[str, tuple[tuple[int, ...], Sequence[str | None]]]
    ) -> None:
        """Raise ShardingError, listing all problems, unless every tensor can be placed and every mesh axis is used.

        `batch` maps a key to the global shape of one microbatch and its logical axes.
        """
        problems = []
        for (path, leaf), names in zip(tree.leaves_with_path(shapes), tree.leaves(axes, is_leaf=is_axes), strict=True):
            for kind in ("param", "grad", "opt"):
                spec_problems = check_spec(f"parameter {path}", tuple(leaf.shape), self.storage_spec(names, kind, mesh), mesh)
                problems += [problem for problem in spec_problems if problem not in problems]
        for key, (shape, logical) in batch.items():
            problems += check_spec(f"batch {key!r} of one microbatch", shape, self.compute_spec(logical, mesh), mesh)
        tables = (self.compute, self.param_storage, self.grad_storage, self.opt_storage)
        used = {axis for table in tables for axes_ in table.values() for axis in axes_}
        idle = [axis for axis in mesh.axes if mesh.axis_size(axis) > 1 and axis not in {*used, "pp"} and not _is_rest(axis, mesh)]
        if "pp" in used:
            problems.append("a row shards by mesh axis 'pp', which places stages: no tensor is sharded by it")
        if idle:
            problems.append(
                f"mesh axes {idle} are used by no row of strategy {self.name!r}: their ranks would all do the same work"
            )
        if problems:
            raise ShardingError(
                f"strategy {self.name!r} cannot place the model:\n  "
                + "\n  ".join(_once_for_all_layers(problems))
                + f"\nmesh: {mesh}\n"
                + "Change the mesh's sizes, the batch or the sequence length, or map the logical axis elsewhere in the strategy."
            )


def preset(name: str) -> Strategy:
    """A strategy by name: `ddp`, `zero1`, `zero2`, `zero3`, `hsdp`, each with `_tp` or `_tp_sp` after it, or `tp`, `tp_sp` alone.

    Raises UnknownNameError with the list of names.
    """
    if name not in PRESETS:
        raise UnknownNameError(f"no strategy is called {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def spec_from_axes(axes: Sequence[str | None], table: AxisTable, mesh: Mesh) -> P:
    """The spec that `table` gives to a tensor with these logical axes, in mesh order. Of several dims whose rows name one mesh
    axis, it shards the first.

    Raises UnknownNameError for a logical name that the table does not have.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in table]
    if unknown:
        raise UnknownNameError(f"logical axes {unknown} are not in the strategy's table, which has {sorted(table)}")
    used: set[str] = set()
    dims = []
    for axis in axes:
        wanted = () if axis is None else mesh.ordered({a for a in table[axis] if a not in used})
        if axis in KEEP_ORDER:
            wanted = tuple(a for a in table[axis] if a in wanted)
        used.update(wanted)
        dims.append(wanted)
    return P(*dims)


def dim_sizes(shapes: Tree, axes: Tree) -> dict[str, int]:
    """The size of every logical axis in a tree of parameters; "attend_heads" and "attend_kv_heads" have those of the heads."""
    leaves = zip(tree.leaves(shapes), tree.leaves(axes, is_leaf=is_axes), strict=True)
    sizes = {name: size for leaf, logical in leaves for size, name in zip(leaf.shape, logical, strict=True) if name}
    return sizes | {f"attend_{name}": sizes[name] for name in ("heads", "kv_heads") if name in sizes}


def _once_for_all_layers(problems: Sequence[str]) -> list[str]:
    """The problems, in which one that parameters of several layers have is there once, with `*` for the number of the layer."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        path, bracket, text = problem.partition(" (")
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", path, count=1) + bracket + text, []).append(problem)
    return [found[0] if len(found) == 1 else f"{problem}, in {len(found)} layers" for problem, found in alike.items()]


def _is_rest(axis: str, mesh: Mesh) -> bool:
    """Whether `axis` is the inner part of an axis that `refine` split: that no row uses it is then intended."""
    return axis.endswith("_inner") and f"{axis.removesuffix('_inner')}_outer" in mesh.axes


_SHARDED = ("heads", "kv_heads", "mlp", "vocab", "expert_mlp")
"""Logical axes that tensor parallelism shards."""


def _presets() -> dict[str, Strategy]:
    sharded: AxisTable = {"embed": ("fsdp", "cp")}  # ranks that share a sequence use the same parameters
    zero = {
        "ddp": ({}, {}, {}),
        "zero1": ({}, {}, sharded),
        "zero2": ({}, sharded, sharded),
        "zero3": (sharded, sharded, sharded),
    }
    zero["hsdp"] = zero["zero3"]  # the same tables: `dp` replicates wherever it is larger than 1
    tensor = {axis: ("tp",) for axis in (*_SHARDED, "attend_heads", "attend_kv_heads")}
    tables = {"": _COMPUTE, "tp": _COMPUTE | tensor, "tp_sp": _COMPUTE | tensor | {"residual_seq": ("cp", "tp")}}
    out = {}
    for data, storage in zero.items():
        for model, compute in tables.items():
            name = "_".join(part for part in (data, model) if part)
            out[name] = Strategy(name, compute, *storage)
    for model in ("tp", "tp_sp"):
        out[model] = replace(out[f"ddp_{model}"], name=model)
    return out


PRESETS: Mapping[str, Strategy] = _presets()
