"""Arrange: turns what a strategy asks for long sequences and experts into rows of its table, and splits mesh axes for it.

How attention over a sharded sequence runs (context parallelism) follows from how queries, keys and values are sharded:

    ring             queries and keys by sequence: keys travel around the ranks (arXiv:2310.01889)
    all_gather       queries by sequence, keys not sharded
    all_to_all       queries and keys by heads, the sequence not sharded (Ulysses, arXiv:2309.14509)
    all_to_all+ring  by heads within groups of ranks, by sequence between the groups

Experts are spread over mesh axes that also shard tokens, or over axes along which all ranks have the same tokens. Rows of the
table express both.
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
    """The strategy with rows for attention and experts, and the mesh, with axes split where these or too few kv heads need it.

    shapes, axes: the model's parameters without data, and their logical axes. Raises ConfigError if the strategy does not fit the
    mesh and the model.
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
            f"strategy {strategy.name!r}: ulysses_size={strategy.ulysses_size} is the number of ranks that divide attention by "
            f"heads, and with context_parallel={method!r} none do; leave it out, or use all_to_all or all_to_all+ring"
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
    """The number of ranks that divide a part of the sequence by heads.

    The query heads of a rank are neighbours. If the number of parts divides the number of kv heads, or the other way round, the
    kv heads that they read can be stored on the same rank. Otherwise some rank would share one of its kv heads with another rank,
    which the specs of queries and keys cannot express.
    """
    num_tensor_ranks = mesh.axis_size(_present(strategy.compute["heads"], mesh))
    common = math.gcd(num_heads // num_tensor_ranks, num_ranks)
    counts = [n for n in range(2, common + 1) if common % n == 0 and _one_divides_other(num_tensor_ranks * n, num_kv_heads)]
    num_wanted = strategy.ulysses_size
    if num_wanted is None:
        smaller = [n for n in counts if n < num_ranks]  # several groups, which a ring connects
        two_levels = strategy.context_parallel == "all_to_all+ring" and counts
        num_wanted = (smaller or counts)[-1] if two_levels else num_ranks
    if num_wanted not in counts:
        ways = ["ring", "all_gather", *(["all_to_all+ring"] if counts and strategy.context_parallel == "all_to_all" else [])]
        raise ConfigError(
            f"strategy {strategy.name!r}: cannot divide attention by heads among {num_wanted} of the "
            f"{num_ranks} ranks that share a sequence: {num_heads} heads on {num_tensor_ranks} tensor parallel ranks are "
            f"{num_heads // num_tensor_ranks} on each, of {num_kv_heads} kv heads in all, so that at most "
            f"{(counts or [1])[-1]} can.\n"
            f"Use context_parallel={' or '.join(ways)}, a smaller cp or tp, or a ulysses_size that divides."
        )
    return num_wanted


def _one_divides_other(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _by_heads(strategy: Strategy, mesh: Mesh, context: tuple[str, ...], count: int) -> tuple[Strategy, Mesh]:
    outer, remaining = list(context), count
    inner: list[str] = []
    while remaining > 1:  # innermost axis first; the last one taken may be split
        axis = outer.pop()
        size = mesh.axis_size(axis)
        if size % remaining and remaining % size:
            raise ConfigError(
                f"strategy {strategy.name!r}: the sequence is sharded over {context}, and no run of its inner axes has the "
                f"{count} ranks that should divide it by heads; use another ulysses_size"
            )
        if size > remaining:
            strategy, mesh = strategy.split(mesh, axis, size // remaining)
            outer.append(f"{axis}_outer")
            axis, size = f"{axis}_inner", remaining
        inner.insert(0, axis)
        remaining //= size
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
        tokens = {name: tuple(axis for axis in token_axes if axis not in axes) for name, token_axes in tokens.items()}
    return replace(strategy, compute={**table, **tokens, "expert": axes, "expert_mlp": inner}), mesh


def _fold(strategy: Strategy, mesh: Mesh, wanted: int) -> tuple[Strategy, Mesh, tuple[str, ...]]:
    """Choose mesh axes of `wanted` ranks in all for the experts: innermost first, those of tensor parallelism last. The last axis
    that is taken may be split. Returns the strategy, the mesh and the axes."""
    named = strategy.expert_axes
    known = {*mesh.axes, *(axis for axes in strategy.compute.values() for axis in axes)} - {"pp"}
    if not known.issuperset(named) or len(set(named)) < len(named):
        raise ConfigError(
            f"strategy {strategy.name!r}: expert_axes are {list(named)}; each of {sorted(known)} can be named once.\n"
            "Name some of them, or none."
        )
    order = named or sorted(
        (axis for axis in reversed(mesh.axes) if axis != "pp"), key=lambda axis: axis in strategy.compute["mlp"]
    )
    remaining, axes = wanted, []
    for axis in order:
        part = math.gcd(remaining, mesh.axis_size(axis))
        if part == 1:
            continue
        if part < mesh.axis_size(axis):
            strategy, mesh = strategy.split(mesh, axis, mesh.axis_size(axis) // part)
            axis = f"{axis}_inner"
        axes.append(axis)
        remaining //= part
    if remaining > 1:
        raise ConfigError(
            f"strategy {strategy.name!r}: {mesh} cannot hold expert_parallel={wanted}: axes {list(order)} leave a factor of "
            f"{remaining}.\nUse a divisor of their sizes, other mesh sizes, or other expert_axes."
        )
    return strategy, mesh, mesh.ordered(set(axes))


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)


def num_order_parts(strategy: Strategy, mesh: Mesh) -> int:
    """The number of parts into which a sequence is cut to give each rank early and late positions; 1 if it stays as it is.

    Under a causal mask the last positions attend to most keys. With rank i of n having the parts i and 2 n - 1 - i (zigzag), all
    ranks have the same work.
    """
    if strategy.sequence not in ("auto", "zigzag", "contiguous"):
        raise ConfigError(f"strategy {strategy.name!r}: sequence is {strategy.sequence!r}; there are auto, zigzag and contiguous")
    ranks = mesh.axis_size(strategy.compute.get("attend_seq", ()))
    return 2 * ranks if ranks > 1 and strategy.sequence != "contiguous" else 1


def sequence_order(length: int, num_parts: int) -> Tensor:
    """The original index of each position of a sequence, its `num_parts` parts reordered to 0, last, 1, ...: (length,) int64."""
    parts = torch.arange(length).view(num_parts, -1)
    dealt = [i // 2 if i % 2 == 0 else num_parts - 1 - i // 2 for i in range(num_parts)]
    return parts[dealt].flatten() if num_parts > 1 else torch.arange(length)


def check_sequence(strategy: Strategy, mesh: Mesh, length: int, *, dealt: bool, num_slices: int = 1) -> None:
    """Raise ShapeError, with the nearest lengths that are possible, unless all ranks get equal parts of a sequence.

    length: that of a sequence, or of one slice if sequences are cut into `num_slices`. dealt: whether the model permits the
    reordering of `sequence_order`.
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
