"""Embedding: ids that a table does not hold, its shards, and what is refused."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DtypeError, ShapeError
from mpar.ops._embedding import embedding_bwd_p, embedding_p

IDS = torch.tensor([[0, 7, 7, -1], [3, 8, 10**12, 5]])
HELD = (IDS >= 0) & (IDS < 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_outside_the_table_give_zeros(dtype, make_tensor):
    """Their rows are 0 and give no gradient; nothing outside the table is read or written."""
    ids = IDS.clamp(max=2**31 - 1).to(dtype)
    table, dy = make_tensor((8, 3), torch.float64, requires_grad=True), make_tensor((2, 4, 3), torch.float64)
    onehot = torch.nn.functional.one_hot(IDS.where(HELD, 8), 9)[..., :8].double()
    y = ops.embedding(ids, table)
    testing.assert_close(y, onehot @ table, name="y")
    testing.assert_close(torch.autograd.grad(y, table, dy)[0], torch.einsum("bsv,bsd->vd", onehot, dy), name="dtable")


def test_gradient_of_bfloat16_accumulates_in_float32():
    """A thousand ones on one row add up to 1000, which bfloat16 additions (that stop at 256) cannot."""
    table = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    ops.embedding(torch.zeros(1000, dtype=torch.int64), table).sum().backward()
    assert table.grad.tolist() == [[1000.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sharded_table_equals_whole(num_ranks, make_tensor, run_sharded):
    """Each rank looks up the ids it holds, the results are a pending sum; the gradient of a shard needs no collective."""
    table, dy = make_tensor((8, 3), torch.float64), make_tensor((2, 4, 3), torch.float64)
    extents = {"v": 8 // num_ranks}
    (y,), collectives = run_sharded(embedding_p, "v", extents, IDS, table.chunk(num_ranks), start=0)
    assert collectives == []
    testing.assert_close(y[0], embedding_p.bind(IDS, table, start=0), name="y")
    (dtable,), collectives = run_sharded(embedding_bwd_p, "v", extents, [IDS] * num_ranks, dy, start=0, num_rows=8)
    assert collectives == []
    testing.assert_close(torch.cat(list(dtable)), embedding_bwd_p.bind(IDS, dy, start=0, num_rows=8), name="dtable")


def test_wrong_operands_are_refused(make_tensor):
    """Ids that are not integers, tables that are not matrices of floating numbers."""
    with pytest.raises(DtypeError, match="int32 or int64"):
        ops.embedding(IDS.double(), make_tensor((8, 3)))
    with pytest.raises(DtypeError, match="needs a floating dtype"):
        ops.embedding(IDS, torch.zeros(8, 3, dtype=torch.int64))
    for shape in ((8,), (0, 3)):
        with pytest.raises(ShapeError, match="at least one row"):
            ops.embedding(IDS, make_tensor(shape))
