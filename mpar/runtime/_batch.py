"""Batch: which rows of a global batch, and which of their positions, a rank works on."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar.arrange import sequence_order
from mpar.ir import Leaf, ProgramData
from mpar.runtime._state import Expected, check_given
from mpar.shards import shard

__all__ = ["batch_key", "batch_rows"]


def batch_rows(program: ProgramData, batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The rows of a global batch (microbatches one after the other) that `rank` works on, and of these its positions.

    Slices of a microbatch follow one another as rows. Where there are several, or ranks share a sequence, "order" says which
    positions they have. Raises ShapeError, listing all offenders, if the batch is not what the program was compiled for.
    """
    first = {batch_key(leaf): leaf for leaf in program.batch if leaf.path.endswith(".0")}
    expected = {key: _whole_batch(program, leaf) for key, leaf in first.items()}
    if "order" in first and "order" not in batch:
        own = sequence_order(first["order"].shape[0], program.order_parts)
        order = torch.cat([own + c * len(own) for c in range(program.num_slices)])
        check_given("this batch", {key: x for key, x in expected.items() if key != "order"}, batch)
        batch = {key: x if program.order_parts == 1 else x[:, order] for key, x in batch.items()} | {"order": order}
    check_given("this batch", expected, batch)
    out = {}
    for key, leaf in first.items():
        pieces = batch[key].split(leaf.shape[0])
        if len(leaf.shape) > 1:
            pieces = [piece for rows in pieces for piece in rows.split(leaf.shape[1], 1)]
        out[key] = torch.cat([shard(piece, leaf.spec, program.mesh, rank) for piece in pieces])
    return out


def _whole_batch(program: ProgramData, leaf: Leaf) -> Expected:
    """The global batch entry of which `leaf` is one piece."""
    *rows, length = leaf.shape
    return leaf.dtype, (*(n * program.num_microbatches for n in rows), length * program.num_slices)


def batch_key(leaf: Leaf) -> str:
    """The batch key of a leaf, whose path is `<key>.<piece>`."""
    return leaf.path.rpartition(".")[0]
