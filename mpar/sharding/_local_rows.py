"""Local programs of ops that choose elements by an index, or add to them: a rank serves what its shard has.

To choose, a rank takes the elements that its shard has and zeros for all others: a pending sum, of the size of the result. When
it adds, it leaves out what belongs to other shards: no message.
"""

from collections.abc import Sequence

import torch
from torch import fx

from mpar.sharding._canonicalise import is_zero, shape_of
from mpar.sharding._emit import Emit, Pending
from mpar.sharding._local_programs import along, argument, local_program
from mpar.sharding._rules import Factors, NodeRule, replicated, tensor_operands

__all__ = ["ROWS", "mine"]

aten = torch.ops.aten
ROWS = "rows"
"""The factor of the dim along which the index chooses."""


def _sizes(pairs: Sequence[tuple[Factors, Sequence[int]]]) -> dict[str, int]:
    return {name: n for dims, shape in pairs for names, n in zip(dims, shape, strict=True) for name in names}


def _elementwise_index(node: fx.Node) -> NodeRule:
    """The rule of gather and scatter_add, whose index has as many dims as the tensor."""
    operands = tensor_operands(node)
    x, *others = (shape_of(operand) for operand in operands)
    if any(len(shape) != len(x) for shape in others):
        return replicated(node)  # an index without entries may have any number of dims
    dim = argument(node, "dim") % max(len(x), 1)
    adds = node.target == aten.scatter_add.default
    same = all(len({shape[i] for shape in (x, *others)}) == 1 for i in range(len(x)) if i != dim) and len(set(others)) == 1
    alone = tuple((f"d{i}",) if i != dim and n > 1 and len({s[i] for s in (x, *others)}) == 1 else () for i, n in enumerate(x))
    crossed = bool(x) and x[dim] > 1 and (same or not adds)
    of_x = tuple((ROWS,) if i == dim and crossed else names for i, names in enumerate(alone))
    entries = not adds or is_zero(operands[0])
    chosen = tuple(("entry",) if i == dim and others[0][i] > 1 and entries else names for i, names in enumerate(alone))
    factors = [of_x, *[chosen if len(set(others)) == 1 else alone] * len(others)]
    results = [of_x if adds else chosen]
    linear = {0} if not adds else {2} if entries else set()
    sizes = _sizes(list(zip(factors, (x, *others), strict=True)))
    return NodeRule(operands, factors, results, sizes, {ROWS} if crossed else set(), linear)


def _vector_index(node: fx.Node) -> NodeRule:
    """The rule of index_select and index_add, whose index has one dim."""
    operands = tensor_operands(node)
    x = shape_of(operands[0])
    dim = argument(node, "dim") % max(len(x), 1)
    alone = tuple((f"d{i}",) if i != dim and n > 1 else () for i, n in enumerate(x))
    of_x = tuple((ROWS,) if i == dim and n > 1 else names for i, names, n in zip(range(len(x)), alone, x, strict=True))
    adds = node.target == aten.index_add.default
    entries = ("entry",) if shape_of(operands[1]) and shape_of(operands[1])[0] > 1 and (not adds or is_zero(operands[0])) else ()
    index = (entries,) * len(shape_of(operands[1]))
    chosen = tuple(entries if i == dim else names for i, names in enumerate(alone))
    factors = [of_x, index, chosen] if adds else [of_x, index]
    linear = {0} if not adds else {2} if is_zero(operands[0]) else set()
    sizes = _sizes(list(zip(factors, map(shape_of, operands), strict=True)))
    return NodeRule(operands, factors, [of_x if adds else chosen], sizes, {ROWS} if (ROWS,) in of_x else set(), linear)


def mine(emit: Emit, index: fx.Node, factor: str = ROWS) -> tuple[fx.Node, fx.Node]:
    """For a global index the place in this rank's shard, and where it belongs to another; there the place is any."""
    place, size = emit(aten.sub.Tensor, index, emit.start_of(factor)), emit.extent_of(factor)
    outside = emit(aten.logical_or.default, emit(aten.lt.Scalar, place, 0), emit(aten.ge.Scalar, place, size))
    return emit(aten.clamp.default, place, 0, size - 1), outside


def _onlymine(emit: Emit, y: fx.Node, outside: fx.Node) -> Pending | fx.Node:
    """`y` with zeros where other ranks have the elements: a pending sum. Truth values are summed here, as small integers."""
    if y.meta["val"].dtype != torch.bool:
        return emit.pending(emit(aten.masked_fill.Scalar, y, outside, 0))
    counts = emit(aten.masked_fill.Scalar, emit.cast(y, torch.uint8), outside, 0)
    return emit.cast(emit.all_reduce(counts, "sum"), torch.bool)


def _spread(emit: Emit, mask: fx.Node, dim: int, ndim: int) -> fx.Node:
    """A vector, as a tensor of `ndim` dims with the vector along `dim`."""
    for new in [0] * dim + [-1] * (ndim - dim - 1):
        mask = emit(aten.unsqueeze.default, mask, new)
    return mask


@local_program(_elementwise_index, aten.gather.default)
def gather(emit: Emit, x: fx.Node, dim: int, index: fx.Node, *, sparse_grad: bool = False) -> Pending | fx.Node:
    """A pending sum of the size of the result."""
    place, outside = mine(emit, index)
    return _onlymine(emit, emit(aten.gather.default, x, dim, place), outside)


@local_program(_vector_index, aten.index_select.default)
def index_select(emit: Emit, x: fx.Node, dim: int, index: fx.Node) -> Pending | fx.Node:
    """A pending sum of the size of the result."""
    place, outside = mine(emit, index)
    ndim = len(emit.shape(x))
    outside = _spread(emit, outside, dim % ndim, ndim) if emit.shape(index) else outside
    return _onlymine(emit, emit(aten.index_select.default, x, dim, place), outside)


@local_program(_elementwise_index, aten.scatter_add.default)
def scatter_add(emit: Emit, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> fx.Node:
    """No message."""
    place, outside = mine(emit, index)
    return emit(aten.scatter_add.default, x, dim, place, emit(aten.masked_fill.Scalar, src, outside, 0))


@local_program(_vector_index, aten.index_add.default)
def index_add(emit: Emit, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: float = 1) -> fx.Node:
    """No message."""
    place, outside = mine(emit, index)
    ndim = len(emit.shape(x))
    source = emit(aten.masked_fill.Scalar, source, _spread(emit, outside, dim % ndim, ndim) if emit.shape(index) else outside, 0)
    return emit(aten.index_add.default, x, dim, place, source, alpha=alpha)


def _selected(node: fx.Node) -> NodeRule:
    """The rule of a selection of one index of a dim."""
    (x,) = tensor_operands(node)
    shape = shape_of(x)
    dim = argument(node, "dim") % len(shape)
    names = tuple((ROWS if i == dim else f"d{i}",) if n > 1 else () for i, n in enumerate(shape))
    result = tuple(name for i, name in enumerate(names) if i != dim)
    return NodeRule([x], [names], [result], _sizes([(names, shape)]), {ROWS} if names[dim] else set(), {0})


@local_program(_selected, aten.select.int)
def select(emit: Emit, x: fx.Node, dim: int, position: int) -> Pending | fx.Node:
    """A pending sum of the size of the result."""
    size = emit.size_of(ROWS)
    rank = emit.coordinate(emit.axes)
    dim, owner = dim % len(emit.shape(x)), position % size // emit.extent_of(ROWS)
    y = emit(aten.select.int, x, dim, position % size % emit.extent_of(ROWS))
    other = emit(aten.ne.Scalar, emit(aten.scalar_tensor.default, rank, dtype=torch.int64, device=torch.device("cpu")), owner)
    return _onlymine(emit, y, other)


def _table(node: fx.Node) -> NodeRule:
    """The rule of an embedding: rows of a table, one for each id."""
    table, ids = tensor_operands(node)
    of_table = tuple((name,) if n > 1 else () for name, n in zip((ROWS, "width"), shape_of(table), strict=True))
    of_ids = tuple((f"entry{i}",) if n > 1 else () for i, n in enumerate(shape_of(ids)))
    sizes = _sizes([(of_table, shape_of(table)), (of_ids, shape_of(ids))])
    replicate = {ROWS} if of_table[0] else set()
    return NodeRule([table, ids], [of_table, of_ids], [(*of_ids, of_table[1])], sizes, replicate, {0})


@local_program(_table, aten.embedding.default)
def embedding(emit: Emit, table: fx.Node, ids: fx.Node, *others: int) -> Pending | fx.Node:
    """A pending sum of the size of the result."""
    place, outside = mine(emit, ids)
    return _onlymine(emit, emit(aten.embedding.default, table, place), emit(aten.unsqueeze.default, outside, -1))


def _table_gradient(node: fx.Node) -> NodeRule:
    """The rule of an embedding's gradient: the sum over ids; rows are sharded where the user of the result wants them so."""
    dy, ids = tensor_operands(node)
    of_ids = tuple((f"entry{i}",) if n > 1 else () for i, n in enumerate(shape_of(ids)))
    width = ("width",) if shape_of(dy)[-1] > 1 else ()
    by_frequency = argument(node, "scale_grad_by_freq")  # then a row depends on how often its id appears on all ranks
    of_ids = () if by_frequency else of_ids
    of_ids = of_ids or ((),) * len(shape_of(ids))
    rows = (ROWS,) if shape_of(node)[0] > 1 and not by_frequency else ()
    sizes = _sizes([((*of_ids, width), shape_of(dy)), ((rows, width), shape_of(node))])
    return NodeRule([dy, ids], [(*of_ids, width), of_ids], [(rows, width)], sizes, {ROWS} if rows else set(), {0})


@local_program(_table_gradient, aten.embedding_dense_backward.default)
def embedding_gradient(emit: Emit, dy: fx.Node, ids: fx.Node, num_rows: int, padding: int, by_frequency: bool) -> fx.Node:
    """No message."""
    place, outside = mine(emit, ids)
    outside = emit(aten.logical_or.default, outside, emit(aten.eq.Scalar, ids, padding))
    dy = emit(aten.masked_fill.Scalar, dy, emit(aten.unsqueeze.default, outside, -1), 0)
    return emit(aten.embedding_dense_backward.default, dy, place, emit.extent_of(ROWS), -1, False)


def _indexed(node: fx.Node) -> NodeRule:
    """The rule of `x[i, :, j]` and of adding to it. Indices are broadcast together; their dims stand where the first index is, or
    in front if the indices are not side by side. Masks, and writes that do not add, let no indexed dim be sharded."""
    operands, x, indices = tensor_operands(node), shape_of(node.args[0]), argument(node, "indices")
    at = [i for i, index in enumerate(indices) if index is not None]
    if any(not indices[i].meta["val"].dtype.is_signed for i in at):
        return replicated(node)
    entries = torch.broadcast_shapes(*(shape_of(indices[i]) for i in at))
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    chosen_shape = [n for i, n in enumerate(x) if i not in at]
    chosen_shape[front:front] = entries
    writes = node.target == aten.index_put.default
    adds = writes and argument(node, "accumulate") and list(shape_of(argument(node, "values"))) == chosen_shape
    parts = not writes or (adds and is_zero(node.args[0]))
    of_x = tuple(() if n == 1 or (i in at and writes and not adds) else (f"d{i}",) for i, n in enumerate(x))
    of_entries = tuple((f"entry{i}",) if n > 1 and parts else () for i, n in enumerate(entries))
    chosen = [names for i, names in enumerate(of_x) if i not in at]
    chosen[front:front] = of_entries
    factors: list[Factors] = [of_x]
    for i in at:
        shape = shape_of(indices[i])
        last = of_entries[len(entries) - len(shape) :]
        factors.append(tuple(names if n > 1 else () for names, n in zip(last, shape, strict=True)))
    if writes:
        shape = shape_of(argument(node, "values"))  # broadcast from the right
        last = tuple(chosen[len(chosen) - len(shape) :])
        factors.append(tuple(names if n > 1 else () for names, n in zip(last, shape, strict=True)))
    sizes = _sizes([(of_x, x), (tuple(chosen), chosen_shape)])
    linear = {0} if not writes else {len(operands) - 1} if parts else set()
    crossed = {f"d{i}" for i in at if of_x[i]}
    return NodeRule(operands, factors, [of_x if writes else tuple(chosen)], sizes, crossed, linear)


def _my_indices(emit: Emit, x: fx.Node, indices: list) -> tuple[list, fx.Node]:
    """Indices into this rank's shard, and where any of them belongs to another rank; negative ones count from the end."""
    places, outside = [], None
    for i, index in enumerate(indices):
        if index is not None and emit.axes_of(f"d{i}"):
            negative = emit(aten.lt.Scalar, index, 0)
            index = emit(aten.where.self, negative, emit(aten.add.Scalar, index, emit.size_of(f"d{i}")), index)
            index, other = mine(emit, index, f"d{i}")
            outside = other if outside is None else emit(aten.logical_or.default, outside, other)
        places.append(index)
    return places, outside


def _beside(emit: Emit, mask: fx.Node, indices: list, ndim: int) -> fx.Node:
    """A mask over the dims of indices, which broadcasts with the tensor of chosen elements."""
    at = [i for i, index in enumerate(indices) if index is not None]
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    for _ in range(ndim - len(at) - front):
        mask = emit(aten.unsqueeze.default, mask, -1)
    return mask


@local_program(_indexed, aten.index.Tensor)
def index(emit: Emit, x: fx.Node, indices: list) -> Pending | fx.Node:
    """A pending sum of the size of the result."""
    places, outside = _my_indices(emit, x, indices)
    outside = _beside(emit, outside, indices, len(emit.shape(x)))
    return _onlymine(emit, emit(aten.index.Tensor, x, places), outside)


@local_program(_indexed, aten.index_put.default)
def index_put(emit: Emit, x: fx.Node, indices: list, values: fx.Node, accumulate: bool = False) -> fx.Node:
    """No message."""
    places, outside = _my_indices(emit, x, indices)
    outside = _beside(emit, outside, indices, len(emit.shape(x)))
    return emit(aten.index_put.default, x, places, emit(aten.masked_fill.Scalar, values, outside, 0), accumulate)


@local_program(along(), aten.topk.default)
def topk(emit: Emit, x: fx.Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[fx.Node, fx.Node]:
    """Two all_gathers, of the k best of each shard and of their indices, then the best of these."""
    dim = dim % len(emit.shape(x))
    best = emit(aten.topk.default, x, min(k, emit.shape(x)[dim]), dim, largest, True)
    indices = emit(aten.add.Tensor, emit.getitem(best, 1), emit.start_of(f"d{dim}"))
    values = emit.all_gather(emit.getitem(best, 0), emit.axes, dim)
    indices = emit.all_gather(indices, emit.axes, dim)
    final = emit(aten.topk.default, values, k, dim, largest, sorted)
    return emit.getitem(final, 0), emit(aten.gather.default, indices, dim, emit.getitem(final, 1))
