"""The product of a few rows with a matrix that lies column by column or row by row, alone and as one of several."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpar import ops
from mpar.ops import lay_by_columns, lay_side_by_side, lie_side_by_side
from mpar.ops._few_rows import _most_rows, few_rows
from mpar.ops._matmul import matmul_is_faster
from mpar.testing import assert_close
from tests.kernels_in_cpp import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("columns", [1, 3, 4, 77])
@pytest.mark.parametrize("inner", [1, 15, 32, 100, 896])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, "most"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_the_product_column_by_column(dtype, rows, inner, columns, make_tensor):
    """In float64, of operands that are parts of wider ones, up to the most rows that there are."""
    rows = _most_rows("columns", dtype) if rows == "most" else rows
    a = make_tensor((rows, inner + 32), dtype)[:, :inner]
    b = make_tensor((columns, inner + 32), dtype)[:, :inner].T
    y = few_rows(a, b)
    assert y.dtype == dtype and y.is_contiguous()
    assert_close(y, (a.double() @ b.double()).to(dtype), rtol=3e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("columns", [32, 96, 320])
@pytest.mark.parametrize("inner", [1, 7, 896])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_equals_the_product_row_by_row(rows, inner, columns, make_tensor):
    """The same of a matrix of float32 as it mostly lies."""
    a, b = make_tensor((rows, inner + 3))[:, :inner], make_tensor((inner, columns + 5))[:, :columns]
    y = few_rows(a, b)
    assert y.is_contiguous()
    assert_close(y, a.double() @ b.double(), rtol=1e-6)


@pytest.mark.parametrize("inner", [512, 520])
@pytest.mark.parametrize(("dtype", "lies"), [(torch.bfloat16, "columns"), (torch.float32, "columns"), (torch.float32, "rows")])
def test_a_row_alone_has_the_same_bits(dtype, lies, inner, make_tensor):
    """Whichever others there are, and with one thread."""
    rows = _most_rows(lies, dtype)
    a, b = make_tensor((rows, inner), dtype), make_tensor((96, inner), dtype).T
    b = b if lies == "columns" else b.contiguous()
    together = few_rows(a, b)
    for count in (1, 3, 7):
        assert torch.equal(torch.cat([few_rows(part, b) for part in a.split(count)]), together)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(few_rows(a, b), together)
    finally:
        torch.set_num_threads(num_threads)


def test_how_many_rows_are_few(make_tensor):
    """16 of float32; by columns as many as mpar's own product for many rows leaves, where there is one."""
    b = make_tensor((64, 96))
    assert few_rows(make_tensor((16, 64)), b) is not None and few_rows(make_tensor((17, 64)), b) is None
    most = 127 if matmul_is_faster() else 16
    by_columns = b.T.contiguous().T
    assert few_rows(make_tensor((most, 64)), by_columns) is not None and few_rows(make_tensor((most + 1, 64)), by_columns) is None


def test_parameters_and_traces(make_tensor):
    """A parameter is read like any tensor; in a trace the product is one op, which computes the same."""
    a, b = make_tensor((2, 64), torch.bfloat16), make_tensor((5, 64), torch.bfloat16).T
    expected = few_rows(a, b)
    assert torch.equal(few_rows(a, torch.nn.Parameter(b, requires_grad=False)), expected)
    traced = make_fx(few_rows, tracing_mode="fake")(a, b)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [torch.ops.mpar_rows.few_rows.default]
    assert torch.equal(traced(a, b), expected)


def test_what_is_left_to_torch(make_tensor):
    """More rows, rows of a matrix that are no multiple of 32, operands that overlap or lie otherwise, other dtypes."""
    a, b = make_tensor((8, 64), torch.bfloat16), make_tensor((32, 64), torch.bfloat16).T
    assert few_rows(a.repeat(16, 1), b) is None and few_rows(a.float().repeat(16, 1), b.float()) is None
    assert few_rows(a, b[:32]) is None and few_rows(a, b.to("meta")) is None
    assert few_rows(a, b.contiguous()) is None and few_rows(a.double(), b.double()) is None
    assert few_rows(a.float(), b) is None and few_rows(a[:0], b) is None
    a, b = a.float(), b.float().contiguous()
    assert few_rows(a, b) is not None and few_rows(a.repeat(3, 1), b) is None
    assert few_rows(a, b[:, :31]) is None and few_rows(a, b[:1].expand(64, -1)) is None
    assert few_rows(a[:, :8].T, b[:8]) is None


@pytest.mark.parametrize("num_summed", [1, 2])
def test_several_are_one_product(num_summed, make_tensor):
    """Weights that lie so are the same weights, their products are those of the plain ones, and they are found to lie so."""
    inner = (64,) if num_summed == 1 else (2, 32)
    weights = [make_tensor((*inner, *columns), torch.bfloat16) for columns in ((4, 16), (2, 16), (2, 16))]
    equation = "bsd,dnh->bsnh" if num_summed == 1 else "bsxy,xynh->bsnh"
    laid = lay_by_columns(weights, range(num_summed))
    assert all(torch.equal(a, b) for a, b in zip(laid, weights, strict=True))
    assert lie_side_by_side(laid, num_summed) and lie_side_by_side(lay_side_by_side(weights, num_summed), num_summed)
    assert not lie_side_by_side(laid[::-1], num_summed) and not lie_side_by_side(weights, num_summed)
    for rows in (1, 20):
        x = make_tensor((1, rows, *inner), torch.bfloat16)
        expected = ops.joined_linear(equation, x, weights)
        assert_close(ops.joined_linear(equation, x, laid), expected.double().to(torch.bfloat16), rtol=5e-3)
        assert_close(ops.einsum(equation, x, laid[1]), ops.einsum(equation, x, weights[1]), rtol=5e-3)


def test_single_columns_of_a_wider_matrix(make_tensor):
    """The distance between columns is that of the weights, whatever stride a dim of size 1 has."""
    wide = make_tensor((4, 64), torch.bfloat16).T
    weights, x = [wide[:, 0:1:2], wide[:, 1:2:2]], make_tensor((1, 3, 64), torch.bfloat16)
    assert_close(ops.joined_linear("bsd,df->bsf", x, weights), (x.double() @ wide[:, :2].double()).to(torch.bfloat16), rtol=5e-3)


def test_a_matrix_that_lies_so_is_not_copied(make_tensor):
    """As an embedding does, which is the output matrix too."""
    table = make_tensor((50, 64), torch.bfloat16)
    (laid,) = lay_by_columns([table], (1,))
    assert laid.data_ptr() == table.data_ptr() and laid.stride() == table.stride()
