"""Batch: the rows of a global batch, and the positions of these rows, that a rank works on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar.arrange import sequence_order
from mpar.ir import Leaf, ProgramData
from mpar.runtime._state import Expected, check_given
from mpar.shards import shard
from mpar.spec import P

__all__ = ["batch_key", "batch_rows", "cut_rows", "positions_in_order", "rows_of"]


def rows_of(program: ProgramData, rank: int) -> tuple[int, ...]:
    """The rows of a global batch (microbatches one after the other) that `rank` works on, in its order.

    From these rows alone a rank makes its batch with `cut_rows`.
    """
    leaf = next(leaf for leaf in program.batch if len(leaf.shape) > 1)
    rows = torch.arange(leaf.shape[0] * program.num_microbatches).split(leaf.shape[0])
    row_spec = P(leaf.spec.padded(len(leaf.shape))[0])
    return tuple(torch.cat([shard(piece, row_spec, program.mesh, rank) for piece in rows]).tolist())


def cut_rows(program: ProgramData, batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The batch of `rank`: from the rows `rows_of(program, rank)` of a global batch, the positions that `rank` has.

    The slices of a microbatch follow one another as rows. If there are several slices, or ranks share a sequence, the entry
    "order" says which positions they have. Raises ShapeError, listing all problems, if the rows do not fit the program.
    """
    first = {batch_key(leaf): leaf for leaf in program.batch if leaf.path.endswith(".0")}
    num_rows = len(rows_of(program, rank))
    expected = {key: _whole_rows(program, leaf, num_rows) for key, leaf in first.items()}
    if "order" in first and "order" not in batch:
        slice_order = sequence_order(first["order"].shape[0], program.order_parts)
        order = torch.cat([slice_order + c * len(slice_order) for c in range(program.num_slices)])
        check_given("this batch", {key: x for key, x in expected.items() if key != "order"}, batch)
        dealt = {key for key, leaf in first.items() if program.order_parts > 1 and leaf.spec.padded(len(leaf.shape))[-1]}
        batch = {key: x[:, order] if key in dealt else x for key, x in batch.items()} | {"order": order}
    check_given("this batch", expected, batch)
    out = {}
    for key, leaf in first.items():
        if len(leaf.shape) == 1:
            pieces, spec = batch[key].split(leaf.shape[0]), leaf.spec
        else:
            rows = batch[key].split(num_rows // program.num_microbatches)
            pieces = tuple(piece for microbatch in rows for piece in microbatch.split(leaf.shape[1], 1))
            spec = P(None, leaf.spec.padded(len(leaf.shape))[1])
        out[key] = torch.cat([shard(piece, spec, program.mesh, rank) for piece in pieces])
    return out


def batch_rows(program: ProgramData, batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The rows of a global batch (microbatches one after the other) that `rank` works on, with its positions only.

    A rank that can read single rows needs no global batch: `cut_rows` makes the same of the rows that `rows_of` lists.
    Raises ShapeError, listing all problems, if the batch does not fit the program.
    """
    leaves = {batch_key(leaf): leaf for leaf in program.batch if leaf.path.endswith(".0")}
    num_rows = max(leaf.shape[0] for leaf in leaves.values() if len(leaf.shape) > 1) * program.num_microbatches
    expected = {key: _whole_rows(program, leaf, num_rows) for key, leaf in leaves.items() if key != "order" or key in batch}
    check_given("this batch", expected, batch)
    rows = torch.tensor(rows_of(program, rank))
    return cut_rows(program, {key: x[rows] if x.ndim > 1 else x for key, x in batch.items()}, rank)


def positions_in_order(program: ProgramData, x_BS: Tensor) -> Tensor:
    """A result of a program of forwards, whose positions are as ranks have them, with its positions in the order of the rows."""
    return x_BS[:, sequence_order(x_BS.shape[1], program.order_parts).argsort().to(x_BS.device)]


def _whole_rows(program: ProgramData, leaf: Leaf, num_rows: int) -> Expected:
    """Dtype and shape of the batch entry of which `leaf` is one piece, with `num_rows` rows and all positions."""
    length = leaf.shape[-1] * program.num_slices
    return leaf.dtype, (num_rows, length) if len(leaf.shape) > 1 else (length,)


def batch_key(leaf: Leaf) -> str:
    """The batch key of a leaf, whose path is `<key>.<piece>`."""
    return leaf.path.rpartition(".")[0]
