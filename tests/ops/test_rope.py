"""RoPE: relative positions, tables per row, dtypes, and what is refused."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DifferentiationError, DtypeError, ShapeError


def _tables(positions_BS, dtype=torch.float64):
    angles = positions_BS.double().unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_alone(interleaved, make_tensor):
    """Moving query and key by the same distance keeps their product: the property that the embedding is made for."""
    q, k = make_tensor((1, 4, 2, 6), torch.float64), make_tensor((1, 4, 2, 6), torch.float64)
    positions = torch.tensor([[3, 0, 7, 2]])
    scores = []
    for shift in (0, 11):
        tables = _tables(positions + shift)
        scores.append(torch.einsum("bsnh,bmnh->bnsm", *(ops.rope(x, *tables, interleaved=interleaved) for x in (q, k))))
    testing.assert_close(scores[0], scores[1])


def test_tables_of_each_row(make_tensor):
    """With B tables each row of the batch has positions of its own; vmap over tables too."""
    x, positions = make_tensor((3, 4, 2, 8), torch.float64), torch.tensor([[0, 1, 2, 3], [5, 5, 0, 1], [9, 8, 7, 6]])
    y = ops.rope(x, *_tables(positions))
    rows = [ops.rope(x[i : i + 1], *_tables(positions[i : i + 1])) for i in range(3)]
    testing.assert_close(y, torch.cat(rows))
    cos, sin = _tables(positions)
    mapped = torch.func.vmap(lambda x, c, s: ops.rope(x[None], c[None], s[None])[0])(x, cos, sin)
    testing.assert_close(mapped, y)


def test_bfloat16_is_turned_in_float32(make_tensor):
    """The result is rounded once: half a last digit of bfloat16, element by element."""
    x, tables = make_tensor((1, 4, 2, 6), torch.bfloat16), _tables(torch.tensor([[0, 1, 2, 3]]))
    exact = ops.rope(x.double(), *tables)
    y = ops.rope(x, *(table.float() for table in tables))
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_many_are_turned_in_place(interleaved, dtype, make_tensor):
    """Tensors that share tables get the bits of `rope` one by one, in their own storage; parts of one projection too."""
    packed = make_tensor((2, 4, 5, 8), dtype)
    xs = [packed[:, :, :3], packed[:, :, 3:4], make_tensor((2, 4, 2, 6), dtype)]
    tables, last = _tables(torch.tensor([[0, 1, 2, 3]]), torch.promote_types(dtype, torch.float32)), packed[:, :, 4].clone()
    expected = [ops.rope(x, *tables, interleaved=interleaved) for x in xs]
    ys = ops.rope_many(xs, *tables, interleaved=interleaved)
    for x, y, e in zip(xs, ys, expected, strict=True):
        assert y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
        assert torch.equal(y, e)
    assert torch.equal(packed[:, :, 4], last)


def test_many_refuses_what_it_cannot_overwrite(make_tensor):
    """Tensors that overlap themselves and strided last dims are listed; gradients are refused."""
    tables, x = _tables(torch.arange(4).view(1, 4), torch.float32), make_tensor((2, 4, 2, 6))
    with pytest.raises(ShapeError, match=r"(?s)xs\[1\].*xs\[2\]"):
        ops.rope_many([x, x[:1].expand(2, 4, 2, 6), make_tensor((2, 4, 6, 2)).transpose(2, 3)], *tables)
    with pytest.raises(DifferentiationError, match="rope_many"):
        ops.rope_many([x.requires_grad_()], *tables)


def test_wrong_operands_are_refused(make_tensor):
    """Shapes and dtypes of the tables that do not fit are named."""
    x, (cos, sin) = make_tensor((2, 4, 2, 6)), _tables(torch.arange(4).view(1, 4), torch.float32)
    for bad in (cos[:, :3], cos.expand(3, 4, 3), torch.zeros(1, 4, 4)):
        with pytest.raises(ShapeError, match="cos and sin must be"):
            ops.rope(x, bad, bad)
    with pytest.raises(ShapeError, match="x must be"):
        ops.rope(x[0], cos, sin)
    with pytest.raises(DtypeError, match="both float32"):
        ops.rope(x, cos.bfloat16(), sin.bfloat16())
