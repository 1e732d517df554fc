"""Arrange: what a strategy asks of long sequences and of experts becomes rows of its table, and mesh axes that are split for it.

Attention over a sequence that is sharded (context parallelism) is a matter of where queries, keys and values are while it runs:

    ring             queries and keys by sequence: keys go round the ranks (arXiv:2310.01889)
    all_gather       queries by sequence, keys whole
    all_to_all       everything by heads, the sequence whole (Ulysses, arXiv:2309.14509)
    all_to_all+ring  by heads within groups of ranks, by sequence between them

Experts are spread over axes that shard tokens too, or over axes along which tokens are the same; both are rows of the table.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mpar.errors import ConfigError, ShapeError
from mpar.mesh import Mesh
from mpar.strategy import AxisTable, Strategy, dim_sizes
from mpar.tree import Tree

__all__ = ["CONTEXT_PARALLEL", "DISPATCHERS", "arrange", "check_sequence", "num_order_parts", "sequence_order"]

CONTEXT_PARALLEL = ("ring", "all_gather", "all_to_all", "all_to_all+ring")
DISPATCHERS = ("all_to_all", "all_gather")


def arrange(strategy: Strategy, mesh: Mesh, shapes: Tree, axes: Tree) -> tuple[Strategy, Mesh]:
    """The strategy with rows for attention and experts, and the mesh with the axes that they, or too few kv heads, split.

    shapes, axes: the model's parameters without data, and their logical axes. Raises ConfigError for what cannot be arranged.
    """
    sizes = dim_sizes(shapes, axes)
    strategy, mesh = _arrange_experts(strategy, mesh, sizes)
    strategy, mesh = _arrange_attention(strategy, mesh, sizes)
    return strategy.refine(mesh, sizes)


def _arrange_attention(strategy: Strategy, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[Strategy, Mesh]:
    table, method = strategy.compute, strategy.context_parallel
    context, heads, kv_heads = (_present(table.get(name, ()), mesh) for name in ("seq", "heads", "kv_heads"))
    if method not in (None, "auto", *CONTEXT_PARALLEL):
        raise ConfigError(
            f"strategy {strategy.name!r}: context_parallel is {method!r}; there are auto, {', '.join(CONTEXT_PARALLEL)}"
        )
    if strategy.ulysses_size is not None and method in ("ring", "all_gather"):
        raise ConfigError(
            f"strategy {strategy.name!r}: ulysses_size={strategy.ulysses_size} is of ranks that divide attention by heads, and "
            f"with context_parallel={method!r} none do; leave it out, or use all_to_all or all_to_all+ring"
        )
    if method is None and "attend_seq" in table:
        return strategy, mesh
    num_ranks = mesh.axis_size(context)
    if num_ranks == 1 or method in (None, "auto", "ring", "all_gather"):
        keys = context if method != "all_gather" else ()
        rows: AxisTable = {
            "attend_seq": context,
            "attend_kv_seq": keys,
            "attend_heads": heads,
            "attend_kv_heads": kv_heads,
        }
        return replace(strategy, compute={**table, **rows}), mesh
    num_heads = sizes.get("heads", 1)
    count = _num_by_heads(strategy, mesh, num_ranks, num_heads, sizes.get("kv_heads", num_heads))
    return _by_heads(strategy, mesh, context, count)


def _num_by_heads(strategy: Strategy, mesh: Mesh, num_ranks: int, num_heads: int, num_kv_heads: int) -> int:
    """Ranks that share a part of the sequence by heads.

    A rank's query heads are neighbours. They read kv heads of its own if one number of parts divides the other; else some would
    share a kv head with another rank's, which no sharding of both can say.
    """
    tensor = mesh.axis_size(_present(strategy.compute["heads"], mesh))
    common = math.gcd(num_heads // tensor, num_ranks)
    counts = [n for n in range(2, common + 1) if common % n == 0 and _one_divides_other(tensor * n, num_kv_heads)]
    wanted = strategy.ulysses_size
    if wanted is None:
        smaller = [n for n in counts if n < num_ranks]  # the rest is a ring
        two_levels = strategy.context_parallel == "all_to_all+ring" and counts
        wanted = (smaller or counts)[-1] if two_levels else num_ranks
    if wanted not in counts:
        ways = ["ring", "all_gather", *(["all_to_all+ring"] if counts and strategy.context_parallel == "all_to_all" else [])]
        raise ConfigError(
            f"strategy {strategy.name!r}: cannot divide attention by heads among {wanted} of the "
            f"{num_ranks} ranks that share a sequence: {num_heads} heads on {tensor} tensor parallel ranks are "
            f"{num_heads // tensor} on each, of {num_kv_heads} kv heads in all, so that at most {(counts or [1])[-1]} can.\n"
            f"Use context_parallel={' or '.join(ways)}, a smaller cp or tp, or a ulysses_size that divides."
        )
    return wanted


def _one_divides_other(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _by_heads(strategy: Strategy, mesh: Mesh, context: tuple[str, ...], count: int) -> tuple[Strategy, Mesh]:
    outer, left = list(context), count
    inner: list[str] = []
    while left > 1:  # innermost first; the last axis taken may be split
        axis = outer.pop()
        size = mesh.axis_size(axis)
        if size % left and left % size:
            raise ConfigError(
                f"strategy {strategy.name!r}: the sequence is sharded over {context}, whose inner axes do not make up the "
                f"{count} ranks that are to divide it by heads; use another ulysses_size"
            )
        if size > left:
            strategy, mesh = strategy.split(mesh, axis, size // left)
            outer.append(f"{axis}_outer")
            axis, size = f"{axis}_inner", left
        inner.insert(0, axis)
        left //= size
    table = strategy.compute
    rows: AxisTable = {
        "attend_seq": tuple(outer),
        "attend_kv_seq": tuple(outer),
        "attend_heads": (*_present(table["heads"], mesh), *inner),
        "attend_kv_heads": (*_present(table["kv_heads"], mesh), *inner),
    }
    return replace(strategy, compute={**table, **rows}), mesh


def _arrange_experts(strategy: Strategy, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[Strategy, Mesh]:
    table = strategy.compute
    if "expert" not in sizes:
        if strategy.expert_parallel > 1:
            raise ConfigError(
                f"strategy {strategy.name!r}: expert_parallel={strategy.expert_parallel} is for layers of experts, and this "
                "model has none"
            )
        return strategy, mesh
    num_experts, wanted = sizes["expert"], strategy.expert_parallel
    if strategy.dispatcher not in DISPATCHERS:
        known = ", ".join(DISPATCHERS)
        raise ConfigError(f"strategy {strategy.name!r}: dispatcher is {strategy.dispatcher!r}; there are {known}")
    if wanted < 1 or num_experts % wanted:
        raise ConfigError(
            f"strategy {strategy.name!r}: {num_experts} experts cannot be spread evenly over expert_parallel={wanted} ranks; "
            f"use a divisor of {num_experts}"
        )
    if strategy.expert_axes and wanted == 1:
        raise ConfigError(
            f"strategy {strategy.name!r}: expert_axes={list(strategy.expert_axes)} say where experts are spread, but "
            f"expert_parallel=1 spreads them over no ranks; set expert_parallel too, to a divisor of {num_experts}"
        )
    if wanted > 1:
        strategy, mesh, axes = _fold(strategy, mesh, wanted)
    else:
        axes = _present(table.get("expert", ()), mesh)
    table = strategy.compute
    inner = () if set(axes) & set(table["mlp"]) or not strategy.expert_tensor_parallel else table["mlp"]
    tokens = {"moe_batch": table["batch"], "moe_seq": table["seq"] if inner else table["residual_seq"]}
    if strategy.dispatcher == "all_gather":
        tokens = {name: tuple(axis for axis in own if axis not in axes) for name, own in tokens.items()}
    return replace(strategy, compute={**table, **tokens, "expert": axes, "expert_mlp": inner}), mesh


def _fold(strategy: Strategy, mesh: Mesh, wanted: int) -> tuple[Strategy, Mesh, tuple[str, ...]]:
    """Axes with `wanted` ranks for the experts, innermost first, tensor parallel ones last; the last one taken may be split."""
    named = strategy.expert_axes
    known = {*mesh.axes, *(axis for axes in strategy.compute.values() for axis in axes)} - {"pp"}
    if not known.issuperset(named) or len(set(named)) < len(named):
        raise ConfigError(
            f"strategy {strategy.name!r}: expert_axes are {list(named)}; experts can be over each of {sorted(known)} once.\n"
            "Name some of them, or none."
        )
    order = named or sorted(
        (axis for axis in reversed(mesh.axes) if axis != "pp"), key=lambda axis: axis in strategy.compute["mlp"]
    )
    left, axes = wanted, []
    for axis in order:
        part = math.gcd(left, mesh.axis_size(axis))
        if part == 1:
            continue
        if part < mesh.axis_size(axis):
            strategy, mesh = strategy.split(mesh, axis, mesh.axis_size(axis) // part)
            axis = f"{axis}_inner"
        axes.append(axis)
        left //= part
    if left > 1:
        raise ConfigError(
            f"strategy {strategy.name!r}: {mesh} cannot hold expert_parallel={wanted}: axes {list(order)} leave a factor of "
            f"{left}.\nUse a divisor of their sizes, other mesh sizes, or other expert_axes."
        )
    return strategy, mesh, mesh.ordered(set(axes))


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)


def num_order_parts(strategy: Strategy, mesh: Mesh) -> int:
    """In how many parts a sequence is dealt out so that each rank has early and late positions; 1 leaves it as it is.

    Of a causal mask the last positions see most: rank i of n gets parts i and 2 n - 1 - i, and all work the same (zigzag).
    """
    if strategy.sequence not in ("auto", "zigzag", "contiguous"):
        raise ConfigError(f"strategy {strategy.name!r}: sequence is {strategy.sequence!r}; there are auto, zigzag and contiguous")
    ranks = mesh.axis_size(strategy.compute.get("attend_seq", ()))
    return 2 * ranks if ranks > 1 and strategy.sequence != "contiguous" else 1


def sequence_order(length: int, num_parts: int) -> Tensor:
    """The original index (length,) int64 of each position of a sequence that is dealt out in `num_parts`: 0, last, 1, ..."""
    parts = torch.arange(length).view(num_parts, -1)
    dealt = [i // 2 if i % 2 == 0 else num_parts - 1 - i // 2 for i in range(num_parts)]
    return parts[dealt].flatten() if num_parts > 1 else torch.arange(length)


def check_sequence(strategy: Strategy, mesh: Mesh, length: int, *, dealt: bool, num_slices: int = 1) -> None:
    """Raise ShapeError, with the lengths that would do, unless ranks get equal parts of a sequence.

    length: of a sequence, or, where it is cut into `num_slices`, of one slice. dealt: whether the model lets its positions be
    dealt out.
    """
    ranks = mesh.axis_size(tuple({*strategy.compute.get("seq", ()), *strategy.compute.get("residual_seq", ())}))
    parts = math.lcm(ranks, num_order_parts(strategy, mesh) if dealt else 1)
    if length % parts:
        length, parts = length * num_slices, parts * num_slices
        longer = -(-length // parts) * parts
        what = "a sequence" if num_slices == 1 else f"each of the {num_slices} slices of a sequence"
        how = f"{ranks} ranks share {what}" + (", in two parts each" if parts > ranks * num_slices else "")
        raise ShapeError(
            f"strategy {strategy.name!r} on {mesh} cannot divide a sequence of {length} positions: {how}, so that its length "
            f"must be a multiple of {parts}.\nUse {longer} ({longer - length} positions of padding)"
            + (f" or {length // parts * parts}." if length > parts else ".")
        )
