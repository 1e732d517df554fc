"""FP8: scales and rounding against their definition, element by element in float64."""

import math

import pytest
import torch

from mpar import ops, testing
from mpar.errors import DifferentiationError, DtypeError, ShapeError, UnknownNameError

BLOCKS = {"tensor": (10**6, 10**6), "row": (1, 10**6), "1x128": (1, 128), "128x128": (128, 128)}
ROWS, COLUMNS = 140, 300


def blocks_of(shape, block):
    """Index of the block, and its slices."""
    height, width = BLOCKS[block]
    for i in range(0, shape[0], height):
        for j in range(0, shape[1], width):
            yield (i // height, j // width), (slice(i, i + height), slice(j, j + width))


def round_to_e4m3(value):
    """To nearest even with 3 bits of mantissa, exponents from -6 to 8, in Python's own numbers."""
    if value == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return round(value / step) * step


@pytest.mark.parametrize("block", BLOCKS)
def test_scale_is_amax_over_the_largest_number(block, make_tensor):
    """Each block has scale amax / 448, and its elements differ from q * scale by at most 2**-4 of themselves, or half a step."""
    x = make_tensor((ROWS, COLUMNS)) * torch.logspace(-3, 3, COLUMNS)
    q, scale = ops.quantise_fp8(x, block=block)
    back = ops.dequantise_fp8(q, scale, block=block, dtype=torch.float64)
    indices = list(blocks_of(x.shape, block))
    assert tuple(scale.shape) == tuple(n + 1 for n in indices[-1][0])
    for index, where in indices:
        amax = float(x[where].abs().max())
        assert float(scale[index]) == pytest.approx(amax / 448, rel=1e-6)
        bound = torch.clamp(x[where].double().abs() * 2**-4, min=float(scale[index]) * 2**-10)
        assert bool(((back[where] - x[where].double()).abs() <= bound * (1 + 1e-6)).all())


def test_elements_round_to_nearest_even():
    """Every step of e4m3 and the middle between two: scale 1, as the largest is 448."""
    values = [
        448.0,
        *(sign * m * 2.0**e for e in range(-11, 5) for m in (1.0, 1.0625, 1.125, 1.1875, 1.3, 1.9375) for sign in (1, -1)),
    ]
    q, scale = ops.quantise_fp8(torch.tensor([values]), block="row")
    assert scale.item() == 1.0
    assert q.float().tolist() == [[round_to_e4m3(value) for value in values]]


@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_have_scale_one(block):
    """A block of zeros is zeros with scale 1."""
    q, scale = ops.quantise_fp8(torch.zeros(3, 130), block=block)
    assert bool((scale == 1).all()) and not q.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_finite_fills_its_block(block, bad, make_tensor):
    """A NaN or an infinity makes its block NaN, scale and elements, and no other."""
    x = make_tensor((130, 140))
    x[2, 3] = bad
    q, scale = ops.quantise_fp8(x, block=block)
    for index, where in blocks_of(x.shape, block):
        spoilt = index == (0, 0) if block != "row" and block != "1x128" else index == (2, 0)
        assert bool(scale[index].isnan()) == spoilt
        assert bool(q[where].float().isnan().all()) == spoilt == bool(q[where].float().isnan().any())


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 3e38])
def test_extreme_sizes(size):
    """The smallest and the largest numbers of float32 neither overflow nor divide by zero; scales stay normal."""
    q, scale = ops.quantise_fp8(torch.tensor([[size, -size, 0.0]]), block="row")
    assert float(scale) >= 2.0**-126 and bool(q.float().isfinite().all())
    back = ops.dequantise_fp8(q, scale, block="row", dtype=torch.float64)
    assert abs(float(back[0, 0]) - size) <= max(size * 2**-4, 2.0**-136)


@pytest.mark.parametrize("block", BLOCKS)
def test_both_has_the_transpose_as_well(block, make_tensor):
    """The second pair is that of the transpose."""
    x = make_tensor((ROWS, COLUMNS))
    got = ops.quantise_fp8_both(x, block=block)
    wanted = (*ops.quantise_fp8(x, block=block), *ops.quantise_fp8(x.T.contiguous(), block=block))
    for actual, expected in zip(got, wanted, strict=True):
        assert actual.is_contiguous() and torch.equal(actual.float(), expected.float())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_empty(block, shape):
    """No elements are quantised to none."""
    q, scale = ops.quantise_fp8(torch.empty(shape), block=block)
    assert q.shape == shape and bool((scale == 1).all())


@pytest.mark.parametrize(
    "blocks", [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("row", "tensor")], ids=str
)
def test_matmul_is_of_what_the_operands_stand_for(blocks, make_tensor):
    """The product is that of q * scale, and near that of the numbers before."""
    x, w = make_tensor((6, COLUMNS)), make_tensor((140, COLUMNS))
    (a, a_scale), (b, b_scale) = (ops.quantise_fp8(m, block=block) for m, block in zip((x, w), blocks, strict=True))
    y = ops.fp8_matmul(a, a_scale, b, b_scale, a_block=blocks[0], b_block=blocks[1], dtype=torch.float32)
    left, right = (torch.zeros(m.shape, dtype=torch.float64) for m in (x, w))
    for out, q, scale, block in ((left, a, a_scale, blocks[0]), (right, b, b_scale, blocks[1])):
        for index, where in blocks_of(q.shape, block):
            out[where] = q[where].double() * scale[index].double()
    testing.assert_close(y, left @ right.T)
    testing.assert_close(y, x.double() @ w.double().T, rtol=0.05)  # 2**-4 at most of each element, which mostly cancels


def test_there_are_no_gradients():
    """Quantising and the product refuse to be differentiated."""
    x = torch.ones(3, 4, requires_grad=True)
    with pytest.raises(DifferentiationError, match="quantise_fp8"):
        ops.quantise_fp8(x, block="row")[1].sum().backward()
    q, scale = ops.quantise_fp8(x.detach(), block="row")
    with pytest.raises(DifferentiationError, match="fp8_matmul"):
        ops.fp8_matmul(q, scale.requires_grad_(), q, scale, a_block="row", b_block="row", dtype=torch.float32).sum().backward()


def test_refuses_what_does_not_fit():
    """Shapes, dtypes and names are said."""
    q, scale = ops.quantise_fp8(torch.ones(3, 4), block="row")
    with pytest.raises(ShapeError, match="two dims"):
        ops.quantise_fp8(torch.ones(3), block="row")
    with pytest.raises(UnknownNameError, match="'column'"):
        ops.quantise_fp8(torch.ones(3, 4), block="column")
    with pytest.raises(ShapeError, match=r"must be \(3, 1\) for blocks 1x128"):
        ops.dequantise_fp8(q, scale[:1], block="1x128")
    with pytest.raises(DtypeError, match="float32"):
        ops.dequantise_fp8(torch.ones(3, 4), scale, block="row")
    with pytest.raises(ShapeError, match=r"\(M, K\) and \(N, K\)"):
        ops.fp8_matmul(q, scale, *ops.quantise_fp8(torch.ones(3, 5), block="row"), a_block="row", b_block="row")
