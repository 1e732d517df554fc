"""Ops on the rows of one rank's experts: finding its slots, taking their rows, and sorting rows that came from several ranks.

Only the local programs of `_dispatch_ranks.py` use them. The number of rows is known only at run time.
"""

import torch
from torch import Tensor

from mpar.ops.primitive import Cost, Primitive

__all__ = ["group_rows_p", "head_rows_p", "own_experts_p", "pad_rows_p", "take_rows_p"]

own_experts_p = Primitive("own_experts", "experts -> own", num_experts="int", sizes="int[]", exchanged="bool[]", mine="int")
take_rows_p = Primitive("take_rows", "x, order, offsets -> rows", num_rows="int")
head_rows_p = Primitive("head_rows", "x, counts -> rows", num_rows="int")
pad_rows_p = Primitive("pad_rows", "x -> rows", num_rows="int")
group_rows_p = Primitive("group_rows", "x, received -> rows", back="bool")


@own_experts_p.def_impl
def _impl_own_experts(experts, *, num_experts, sizes, exchanged, mine):
    """The experts of slots, renumbered to those that this rank can reach; -1 for experts that it cannot.

    Experts are sharded over mesh axes of `sizes`, first axis major; each rank has neighbouring experts. Rows are exchanged along
    axes for which `exchanged` is true, so that all experts along them can be reached. Along the other axes this rank, whose
    coordinate is `mine`, selects its own experts.
    """
    per_rank, total = num_experts, 1
    for size in sizes:
        per_rank //= size
        total *= size
    rank, local = experts // per_rank, experts % per_rank
    exchange_rank, select_rank = torch.zeros_like(experts), torch.zeros_like(experts)
    for size, is_exchanged in zip(sizes, exchanged, strict=True):
        total //= size
        coordinate = rank // total % size
        if is_exchanged:
            exchange_rank = exchange_rank * size + coordinate
        else:
            select_rank = select_rank * size + coordinate
    outside = (experts < 0) | (experts >= num_experts) | (select_rank != mine)
    return (exchange_rank * per_rank + local).masked_fill(outside, -1)


@own_experts_p.def_abstract
def _abstract_own_experts(experts, *, num_experts, sizes, exchanged, mine):
    return torch.empty(experts.shape, dtype=experts.dtype, device=experts.device)


@take_rows_p.def_impl
def _impl_take_rows(x, order, offsets, *, num_rows):
    """The rows of `x` (T, D) for the first slots of `order` (T * K,), as many as the last of `offsets` says."""
    per_token = order.shape[0] // max(x.shape[0], 1)
    return x.index_select(0, order[: int(offsets[-1])].long() // max(per_token, 1))


@take_rows_p.def_abstract
def _abstract_take_rows(x, order, offsets, *, num_rows):
    return torch.empty((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)


@head_rows_p.def_impl
def _impl_head_rows(x, counts, *, num_rows):
    """The first rows of `x`, as many as the sum of `counts`."""
    return x[: int(counts.sum())].clone()


@head_rows_p.def_abstract
def _abstract_head_rows(x, counts, *, num_rows):
    return torch.empty((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)


@pad_rows_p.def_impl
def _impl_pad_rows(x, *, num_rows):
    """`x` followed by rows of zeros, so that there are `num_rows` rows."""
    rows = torch.zeros((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)
    rows[: x.shape[0]] = x
    return rows


@pad_rows_p.def_abstract
def _abstract_pad_rows(x, *, num_rows):
    return torch.empty((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)


@group_rows_p.def_impl
def _impl_group_rows(x, received, *, back):
    """The rows of `x`, which are sorted by rank, then expert, sorted by expert, then rank; with `back` the reverse.

    `received` (experts, ranks) has the number of rows of each block, which is the rows of one expert from one rank.
    """
    counts = received.T if back else received  # its first dim is the first sort key of the result
    starts = counts.T.flatten().cumsum(0) - counts.T.flatten()  # where blocks start in x, in the order of x
    starts = starts.view(counts.T.shape).T.flatten()
    sizes = counts.flatten().long()
    before = sizes.cumsum(0) - sizes
    shift = torch.repeat_interleave(starts.long() - before, sizes)
    return x.index_select(0, shift + torch.arange(shift.shape[0], device=x.device))


@group_rows_p.def_abstract
def _abstract_group_rows(x, received, *, back):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


own_experts_p.def_sharding("... k -> ... k")
take_rows_p.def_sharding("t d, s, e -> r d", need_replication="t s e r")
head_rows_p.def_sharding("t d, e -> r d", need_replication="t e r")
pad_rows_p.def_sharding("r d -> s d", need_replication="r s")
group_rows_p.def_sharding("r d, e n -> r d", need_replication="r e n")
for _primitive in (own_experts_p, take_rows_p, head_rows_p, pad_rows_p, group_rows_p):
    _primitive.def_batching_loop()
for _primitive in (take_rows_p, head_rows_p, group_rows_p):
    _primitive.asks_host = True


def _moved(x: Tensor, rows: int, indices: int) -> Cost:
    size = x.shape[-1] * x.element_size()
    return Cost(flops=0, bytes=2 * rows * size + 8 * indices, workspace=24 * indices)


own_experts_p.def_cost(lambda experts, **_: Cost(flops=0, bytes=2 * experts.nbytes, workspace=6 * experts.nbytes))
take_rows_p.def_cost(lambda x, order, offsets, *, num_rows: _moved(x, num_rows, order.shape[0]))
head_rows_p.def_cost(lambda x, counts, *, num_rows: _moved(x, num_rows, 0))
pad_rows_p.def_cost(lambda x, *, num_rows: _moved(x, num_rows, 0))
group_rows_p.def_cost(lambda x, received, *, back: _moved(x, x.shape[0], x.shape[0]))
