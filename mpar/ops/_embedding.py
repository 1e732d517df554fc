"""Embedding: rows of a table, one per id. A shard of the table gives zero rows for the ids that it does not hold."""

import torch
from torch import Tensor

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive

__all__ = ["embedding"]

embedding_p = Primitive("embedding", "ids, table -> y", start="int")
embedding_bwd_p = Primitive("embedding_bwd", "ids, dy -> dtable", start="int", num_rows="int")
embedding_p.bwd = embedding_bwd_p
embedding_bwd_p.opaque = True  # on a CPU it asks whether ids are outside


def embedding(ids: Tensor, table_VD: Tensor) -> Tensor:
    """`table_VD[ids]` of shape (*ids.shape, D) and the dtype of the table; an id outside [0, V) gives a row of zeros.

    The gradient of a table narrower than float32 is accumulated in float32.
    Raises DtypeError if `ids` are not int32 or int64 or the table is not floating, ShapeError if it is not (V, D) with V > 0.
    """
    return embedding_p.bind(ids, table_VD, start=0)


def _check_ids(ids):
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"embedding: ids {tuple(ids.shape)} have dtype {ids.dtype}, need int32 or int64")


@embedding_p.def_abstract
def _abstract(ids, table, *, start):
    _check_ids(ids)
    if table.ndim != 2 or not table.shape[0]:
        raise ShapeError(f"embedding: the table has shape {tuple(table.shape)}; it must be (V, D) with at least one row")
    if not table.is_floating_point():
        raise DtypeError(f"embedding: the table {tuple(table.shape)} has dtype {table.dtype}, needs a floating dtype")
    return torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=table.device)


@embedding_p.def_impl
def _impl(ids: Tensor, table: Tensor, *, start: int) -> Tensor:
    rows, outside = _local_rows(ids, start, table.shape[0])
    y = table.contiguous().index_select(0, rows.clamp_(0, table.shape[0] - 1))
    if ids.device.type != "cpu" or type(ids) is not Tensor or bool(outside.any()):  # cheap to ask on a CPU
        y.masked_fill_(outside.unsqueeze(-1), 0.0)
    return y.view(*ids.shape, table.shape[1])


def _local_rows(ids: Tensor, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    rows = ids.flatten() - start
    return rows, (rows < 0) | (rows >= num_rows)


@embedding_p.def_vjp_by_ops("ids, table, dy -> dtable")  # the backward uses only the table's number of rows
def _vjp(ids, table, dy, *, start):
    return embedding_bwd_p.bind(ids, dy, start=start, num_rows=table.shape[0])


@embedding_bwd_p.def_abstract
def _abstract_bwd(ids, dy, *, start, num_rows):
    _check_ids(ids)
    if dy.shape[:-1] != ids.shape:
        raise ShapeError(f"embedding_bwd: dy {tuple(dy.shape)} does not fit ids {tuple(ids.shape)}; it must be (*ids.shape, D)")
    return torch.empty((num_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)


@embedding_bwd_p.def_impl
def _impl_bwd(ids: Tensor, dy: Tensor, *, start: int, num_rows: int) -> Tensor:
    rows, outside = _local_rows(ids, start, num_rows)
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32)).reshape(-1, dy.shape[-1])
    if ids.device.type == "cpu":  # takes half the time of the op below, which on other devices is the deterministic one
        if bool(outside.any()):
            rows, wide = rows[~outside], wide[~outside]
        return wide.new_zeros(num_rows, dy.shape[-1]).index_add_(0, rows, wide).to(dy.dtype)
    # -1 is passed as the padding index, so that the op skips rows of -1
    dtable = torch.ops.aten.embedding_dense_backward.default(wide, rows.masked_fill_(outside, -1), num_rows, -1, False)
    return dtable.to(dy.dtype)


@embedding_bwd_p.def_vjp_by_ops("ids, ddtable -> ddy")
def _vjp_bwd(ids, ddtable, *, start, num_rows):
    return embedding_p.bind(ids, ddtable, start=start)


embedding_p.def_sharding("..., v d -> ... d", linear="table")
embedding_p.def_batching_loop()
embedding_bwd_p.def_sharding("..., ... d -> v d", linear="dy")
embedding_bwd_p.def_batching_loop()


@embedding_p.def_sharded("v")
def _sharded(emit, ids, table, *, start):
    return emit.pending(emit(embedding_p, ids, table, start=emit.start))


@embedding_bwd_p.def_sharded("v")
def _sharded_bwd(emit, ids, dy, *, start, num_rows):
    return emit(embedding_bwd_p, ids, dy, start=emit.start, num_rows=emit.extent_of("v"))


@embedding_p.def_cost
def _cost(ids, table, *, start):
    return Cost(flops=0, bytes=ids.nbytes + 2 * ids.numel() * table.shape[1] * table.element_size())


@embedding_bwd_p.def_cost
def _cost_bwd(ids, dy, *, start, num_rows):
    dtable = num_rows * dy.shape[-1] * dy.element_size()
    wide = 0 if dy.element_size() >= 4 else 4 * (dy.numel() + num_rows * dy.shape[-1])
    return Cost(flops=dy.numel(), bytes=ids.nbytes + 2 * dy.nbytes + dtable, workspace=wide)
