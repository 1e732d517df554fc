"""RoPE's kernels against float64: layouts, partial rotation, strides, tables per row, and in place."""

import pytest
import torch

from mpar import testing
from mpar.kernels import implementation
from mpar.kernels._catalogue import CATALOGUE

ROPE, MANY = implementation("rope", "triton"), implementation("rope_many", "triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference(x, cos, sin, interleaved):
    """Su et al.'s rotation of each pair as a product of complex numbers, in float64."""
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(2)
    x = x.double()
    if interleaved:
        pairs = torch.view_as_complex(x[..., : 2 * half].unflatten(-1, (half, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn).flatten(-2)
    else:
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        turned = torch.cat([turned.real, turned.imag], -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def tables(make, rows, length, half):
    """Cosines and sines of any angles."""
    angles = 10 * make((rows, length, half), torch.float64)
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [1, 3, 8, 12])
def test_matches_float64(half, interleaved, dtype, make_tensor):
    """Half and interleaved layout, the first 2, 6, 16 or all of 24 features, more heads than a block holds."""
    x, (cos, sin) = make_tensor((2, 3, 37, 24), dtype), tables(make_tensor, 1, 3, half)
    y = ROPE(x, cos, sin, interleaved=interleaved)
    assert y.dtype == dtype and y.is_contiguous()
    testing.assert_close(y, reference(x, cos, sin, interleaved))


@pytest.mark.parametrize("half", [16, 32, 48, 64, 128, 256])
def test_every_class(half, make_tensor):
    """Pairs in every class of the table, in place."""
    x, (cos, sin) = make_tensor((1, 2, 5, 2 * half)), tables(make_tensor, 1, 2, half)
    expected = reference(x, cos, sin, False)
    (y,) = MANY([x], cos, sin, interleaved=False)
    assert y is x
    testing.assert_close(y, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_in_place(interleaved, make_tensor):
    """Tensors with other numbers of heads and head sizes are overwritten, whatever their count; what is not turned stays."""
    cos, sin = tables(make_tensor, 2, 3, 6)
    shapes = [(2, 3, 4, 16), (2, 3, 1, 12), (2, 3, 9, 16), (2, 3, 0, 16), (2, 3, 2, 20)]
    for count in range(len(shapes) + 1):
        xs = [make_tensor(shape, torch.bfloat16) for shape in shapes[:count]]
        expected = [reference(x, cos, sin, interleaved) for x in xs]
        ys = MANY(xs, cos, sin, interleaved=interleaved)
        assert len(ys) == count
        for x, y, e in zip(xs, ys, expected, strict=True):
            assert y is x
            testing.assert_close(y, e)


def test_strided_operands(make_tensor, device):
    """Queries and keys that are parts of one packed projection, in place; transposed and expanded operands; strided tables."""
    packed, (cos, sin) = make_tensor((2, 3, 6, 8)), tables(make_tensor, 2, 3, 4)
    before = packed.clone()
    q, k, v = packed[:, :, :4], packed[:, :, 4:5], packed[:, :, 5:]
    MANY([q, k], cos, sin, interleaved=False)
    testing.assert_close(packed[:, :, :5], reference(before[:, :, :5], cos, sin, False))
    assert torch.equal(v, before[:, :, 5:])
    turned = make_tensor((2, 4, 3, 8)).transpose(1, 2)
    last = make_tensor((2, 3, 8, 4)).transpose(2, 3)
    for x in (turned, last, torch.ones((), device=device).expand(2, 3, 4, 8)):
        testing.assert_close(ROPE(x, cos, sin, interleaved=True), reference(x, cos, sin, True))
    columns = [table.transpose(1, 2).contiguous().transpose(1, 2) for table in (cos, sin)]
    testing.assert_close(ROPE(turned, *columns, interleaved=False), reference(turned, cos, sin, False))


def test_one_table_for_all_rows(make_tensor):
    """A table of one row serves every row of the batch, also where its stride is anything."""
    x, (cos, sin) = make_tensor((3, 2, 2, 8)), tables(make_tensor, 1, 2, 4)
    testing.assert_close(ROPE(x, cos, sin, interleaved=False), reference(x, cos, sin, False))


def test_back_again(make_tensor):
    """The rotation by the opposite angles is the inverse, which is the gradient's rule."""
    x, (cos, sin) = make_tensor((1, 4, 3, 16)), tables(make_tensor, 1, 4, 8)
    y = ROPE(x, cos, sin, interleaved=False)
    testing.assert_close(ROPE(y, cos, -sin, interleaved=False), x)


def test_no_tokens(make_tensor):
    """Without tokens or heads there is nothing to do."""
    cos, sin = tables(make_tensor, 1, 0, 4)
    assert ROPE(make_tensor((2, 0, 3, 8)), cos, sin, interleaved=False).shape == (2, 0, 3, 8)
    cos, sin = tables(make_tensor, 1, 2, 4)
    assert ROPE(make_tensor((2, 2, 0, 8)), cos, sin, interleaved=False).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("shape", [(3, 1, 2, 8), (1, 3, 2, 8)], ids=str)
def test_offsets_beyond_2_to_the_31(shape, make_tensor, device):
    """The third token is found where rows, or tokens, are 2**30 elements apart: strides fit int32, offsets do not."""
    base = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)
    x, (cos, sin) = base.as_strided(shape, (2**30, 2**30, 8, 1)), tables(make_tensor, shape[0], shape[1], 4)
    x.copy_(make_tensor(shape))
    expected = reference(x, cos, sin, False)
    MANY([x], cos, sin, interleaved=False)
    testing.assert_close(x, expected)


def test_what_is_not_supported_is_named():
    """Tables of float64 and rotations of more than 512 features."""
    x, table = torch.empty(1, 2, 1, 2048, device="meta"), torch.empty(1, 2, 512, device="meta")
    assert "1024 features" in CATALOGUE["rope"][0].supports("sm_90", x, table, table, interleaved=False)
    table = torch.empty(1, 2, 32, device="meta", dtype=torch.float64)
    assert "float64" in CATALOGUE["rope_many"][0].supports("sm_90", [x], table, table, interleaved=False)
