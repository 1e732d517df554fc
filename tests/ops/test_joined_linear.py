"""Joined linear: the products of each weight, whether the weights lie side by side or not, and nothing else is taken for that."""

import pytest
import torch

from mpar import ops
from mpar.errors import DtypeError, ShapeError
from mpar.testing import assert_close

CASES = {
    "bsd,dnh->bsnh": ((2, 3, 8), [(8, 4, 2), (8, 2, 2), (8, 1, 2)]),
    "bsd,df->bsf": ((2, 3, 8), [(8, 5), (8, 7)]),
    "bsnh,nhf->bsf": ((2, 3, 4, 2), [(4, 2, 5), (4, 2, 1)]),
    "td,df->tf": ((100, 8), [(8, 5), (8, 7)]),
}
JOINED = ops.PRIMITIVES["joined_linear"]


def operands(equation, dtype):
    shape, weights = CASES[equation]
    return torch.randn(shape).to(dtype), [torch.randn(each).to(dtype) for each in weights]


def plain(equation, x, weights):
    return torch.cat(
        [torch.einsum(equation, x.double(), w.double()).reshape(*x.shape[: _rows(equation)], -1) for w in weights], -1
    )


def _rows(equation):
    return len(equation.partition(",")[0]) - ops.summed_dims(equation)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("equation", CASES)
def test_products_are_those_of_each_weight(equation, dtype):
    x, weights = operands(equation, dtype)
    num_summed = ops.summed_dims(equation)
    expected = plain(equation, x, weights)
    assert not ops.lie_side_by_side(weights, num_summed)
    assert_close(JOINED.meaning(x, weights, equation=equation), expected, name="apart")
    for lay in (ops.lay_side_by_side, ops.pack_matrices):
        together = lay(weights, num_summed)
        if together is None:  # torch has no blocks for this dtype
            continue
        assert ops.lie_side_by_side(together, num_summed)
        assert all(torch.equal(new + 0, old) for new, old in zip(together, weights, strict=True))
        assert_close(JOINED.meaning(x, together, equation=equation), expected, name=f"together by {lay.__name__}")
        for weight, other in zip(together, weights, strict=True):
            y = ops.PRIMITIVES["einsum"].meaning(x, weight, equation=equation)
            assert_close(y, torch.einsum(equation, x.double(), other.double()), name="alone")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_neighbours_are_multiplied_as_one(dtype):
    """Another order, a part of them, and weights of another matrix are multiplied one by one."""
    equation = "bsd,dnh->bsnh"
    x, weights = operands(equation, dtype)
    lay = ops.lay_side_by_side if ops.pack_matrices(weights, 1) is None else ops.pack_matrices
    (q, k, v), others = lay(weights, 1), lay(weights, 1)
    for chosen in ([k, q, v], [k, v], [q, v], [q, others[1], v], [q, k, weights[2]]):
        y = JOINED.meaning(x, chosen, equation=equation)
        assert_close(y, plain(equation, x, [w + 0 for w in chosen]), name="y")


def test_equations_that_do_not_fit():
    assert [ops.summed_dims(each) for each in ("bsd,dnh->bsnh", "bsnh,nhd->bsd")] == [1, 2]
    assert [ops.summed_dims(each) for each in ("bsd,vd->bsv", "bsd,bsf->df", "bsd,df->fbs")] == [None] * 3
    x, weights = operands("bsd,df->bsf", torch.float32)
    with pytest.raises(ShapeError, match="equation must be"):
        ops.joined_linear("bsd,vd->bsv", x, weights)
    with pytest.raises(ShapeError, match="each weight must have 2 dims"):
        ops.joined_linear("bsd,df->bsf", x, [weights[0].T, weights[1]])
    with pytest.raises(DtypeError, match="one floating dtype"):
        ops.joined_linear("bsd,df->bsf", x, [weights[0].double(), weights[1]])
