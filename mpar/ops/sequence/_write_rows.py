"""Write rows: new rows take the places of old ones in a pool, such as the keys of new tokens in the pages of a cache."""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Emitter, Primitive

__all__ = ["write_rows"]

write_rows_p = Primitive("write_rows", "pool, rows, places -> new_pool", shard="bool")
write_rows_over_p = Primitive("write_rows_over", "pool, rows, places -> new_pool", shard="bool")
write_rows_over_p.mutates = ("pool",)


def write_rows(pool_BPKH: Tensor, rows_BTKH: Tensor, places_BT: Tensor) -> Tensor:
    """The pool with row t of group b at place `places_BT[b, t]` among the P rows of this group.

    If several rows have one place, the last of them stays there. `pool_BPKH` is not changed, but a program that keeps the pool
    as its state writes into it. There is no gradient. Raises ShapeError or DtypeError if the operands do not fit each other.
    """
    return write_rows_p.bind(pool_BPKH, rows_BTKH, places_BT, shard=False)


def _abstract(pool, rows, places, *, shard):
    shapes = f"write_rows: pool {tuple(pool.shape)}, rows {tuple(rows.shape)}, places {tuple(places.shape)}"
    if pool.ndim != 4 or rows.ndim != 4 or (rows.shape[0], *rows.shape[2:]) != (pool.shape[0], *pool.shape[2:]):
        raise ShapeError(f"{shapes}: they must be (B, P, K, H), (B, T, K, H), (B, T)")
    if places.shape != rows.shape[:2]:
        raise ShapeError(f"{shapes}: places must be {tuple(rows.shape[:2])}, one for each row")
    if pool.dtype != rows.dtype or places.dtype != torch.int64:
        dtypes = f"{pool.dtype}, {rows.dtype}, {places.dtype}"
        raise DtypeError(f"{shapes}: dtypes are {dtypes}; places must be int64, the others equal")
    return torch.empty(pool.shape, dtype=pool.dtype, device=pool.device)


write_rows_p.def_abstract(_abstract)
write_rows_over_p.def_abstract(_abstract)


@write_rows_p.def_impl
def _impl(pool: Tensor, rows: Tensor, places: Tensor, *, shard: bool) -> Tensor:
    return _write_over(pool.clone(), rows, places, shard=shard)


@write_rows_over_p.def_impl
def _write_over(pool: Tensor, rows: Tensor, places: Tensor, *, shard: bool) -> Tensor:
    """shard: the pool lacks places, so rows may have a place outside of it, where they are not written."""
    if pool.shape[0] == 1 and not shard:
        return pool.index_copy_(1, places[0], rows)
    for group in range(pool.shape[0]):
        new, where = rows[group], places[group]
        if shard:
            inside = (where >= 0) & (where < pool.shape[1])
            new, where = new[inside], where[inside]
        pool[group].index_copy_(0, where, new)
    return pool


def _write_on_rank(op: Primitive) -> Callable:
    """The local program of a rank that has some of the places."""

    def program(emit: Emitter, pool: fx.Node, rows: fx.Node, places: fx.Node, **params: object) -> fx.Node:
        emit.opaque()
        return emit(op, pool, rows, emit(torch.ops.aten.sub.Tensor, places, emit.start_of("p")), shard=True)

    return program


for primitive in (write_rows_p, write_rows_over_p):
    primitive.def_sharding("b p k h, b t k h, b t -> b p k h", need_replication="t")
    primitive.def_sharded("p")(_write_on_rank(primitive))
    primitive.def_batching_loop()


@write_rows_p.def_cost
def _cost(pool, rows, places, *, shard):
    return Cost(flops=0, bytes=2 * pool.nbytes + 2 * rows.nbytes + places.nbytes)


@write_rows_over_p.def_cost
def _cost_over(pool, rows, places, *, shard):
    return Cost(flops=0, bytes=2 * rows.nbytes + places.nbytes)
