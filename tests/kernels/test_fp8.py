"""Kernels of FP8: the same bits as the definition has, and products against float64."""

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import implementation

BLOCKS = {"tensor": (10**6, 10**6), "row": (1, 10**6), "1x128": (1, 128), "128x128": (128, 128)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernel(primitive):
    """Triton's implementation."""
    return implementation(primitive, "triton")


def blocks_of(shape, block):
    """Index of the block, and its slices."""
    height, width = BLOCKS[block]
    for i in range(0, shape[0], height):
        for j in range(0, shape[1], width):
            yield (i // height, j // width), (slice(i, i + height), slice(j, j + width))


def quantise(x, block):
    """Block by block, in float32: scale = amax / 448; elements times 1 / scale, limited, rounded by torch."""
    indices = list(blocks_of(x.shape, block))
    scale = torch.empty([n + 1 for n in indices[-1][0]])
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for index, where in indices:
        part = x[where].float().cpu()
        amax = part.abs().max() if bool(part.isfinite().all()) else torch.tensor(float("nan"))
        scale[index] = torch.where(amax == 0, torch.tensor(1.0), torch.clamp(amax / 448, min=2.0**-126))
        q[where] = (part * (1 / scale[index])).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, scale


def same(actual, expected, name):
    """Bit for bit, NaN equal to NaN."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype and actual.is_contiguous(), name
    assert torch.equal(actual.cpu().float().nan_to_num(1e9), expected.float().nan_to_num(1e9)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(140, 300), (1, 128), (129, 7)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_quantise_is_the_definition(block, shape, dtype, make_tensor):
    """Scales and elements, of the matrix and of its transpose, bit for bit; sizes differ by columns, one block is zero."""
    spread = torch.logspace(-2, 2, shape[1]).to(make_tensor((1,)).device)
    x = (make_tensor(shape) * spread).to(dtype)
    x[: shape[0] // 2, :] *= 0.125
    x[:1] = 0
    expected = (*quantise(x, block), *quantise(x.T, block))
    for actual, wanted, name in zip(kernel("quantise_fp8")(x, block=block), expected[:2], ("q", "scale"), strict=True):
        same(actual, wanted, name)
    for actual, wanted, name in zip(
        kernel("quantise_fp8_both")(x, block=block), expected, ("q", "scale", "qt", "scale_t"), strict=True
    ):
        same(actual, wanted, name)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_finite_fills_its_block(block, bad, make_tensor):
    """A NaN or an infinity makes its block NaN, scale and elements, and no other; also in the transpose."""
    x = make_tensor((130, 140))
    x[2, 3] = bad
    expected = (*quantise(x, block), *quantise(x.T, block))
    assert expected[1].isnan().sum() == 1
    for actual, wanted in zip(kernel("quantise_fp8_both")(x, block=block), expected, strict=True):
        same(actual, wanted, block)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-37, 3e38])
@pytest.mark.parametrize("block", BLOCKS)
def test_extreme_sizes(block, size, device):
    """Zeros, the smallest and the largest numbers: as the definition, scales normal."""
    x = torch.tensor([[size, -size, 0.0]], device=device)
    for actual, wanted in zip(kernel("quantise_fp8")(x, block=block), quantise(x, block), strict=True):
        same(actual, wanted, block)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_empty(block, shape, device):
    """No elements are quantised to none, and back."""
    x = torch.empty(shape, device=device)
    expected = implementation("quantise_fp8_both")(x.cpu(), block=block)
    for actual, wanted in zip(kernel("quantise_fp8_both")(x, block=block), expected, strict=True):
        same(actual, wanted, block)
    q, scale = kernel("quantise_fp8")(x, block=block)
    assert kernel("dequantise_fp8")(q, scale, block=block, dtype=torch.float32).shape == shape


def test_quantise_reads_views(make_tensor):
    """Rows at a distance, and a transpose, which is copied."""
    x = make_tensor((20, 300))
    for view in (x[::2, 5:200], x.T):
        same(kernel("quantise_fp8")(view, block="1x128")[0], quantise(view, "1x128")[0], "q")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_dequantise_is_a_product(block, dtype, make_tensor):
    """Each element times the scale of its block, rounded once."""
    q, scale = quantise(make_tensor((140, 300)), block)
    expected = torch.empty(q.shape)
    for index, where in blocks_of(q.shape, block):
        expected[where] = q[where].float() * scale[index]
    device = make_tensor((1,)).device
    actual = kernel("dequantise_fp8")(q.to(device), scale.to(device), block=block, dtype=dtype)
    same(actual, expected.to(dtype), "x")


PAIRS = [("tensor", "tensor"), ("tensor", "row"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(140, 270, 304), (3, 130, 128), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("blocks", PAIRS, ids=str)
def test_matmul_matches_float64(blocks, shape, dtype, make_tensor):
    """The product of what the operands stand for; tails of all dims, blocks of different sizes."""
    m, n, k = shape
    device = make_tensor((1,)).device
    x, w = make_tensor((m, k)), make_tensor((n, k))
    x[:, : k // 2] *= 100
    w[: n // 2] *= 0.01
    operands, wide = [], []
    for matrix, block in ((x, blocks[0]), (w, blocks[1])):
        q, scale = quantise(matrix, block)
        operands += [q.to(device), scale.to(device)]
        wide.append(torch.empty(q.shape, dtype=torch.float64, device=device))
        for index, where in blocks_of(q.shape, block):
            wide[-1][where] = (q[where].double() * scale[index].double()).to(device)
    y = kernel("fp8_matmul")(*operands, a_block=blocks[0], b_block=blocks[1], dtype=dtype)
    # tensor cores add up 128 products with about 14 bits: 2**-13 where they run, float32 in the interpreter
    testing.assert_close(y, wide[0] @ wide[1].T, name="y", rtol=None if device.type == "cpu" or dtype != torch.float32 else 2e-3)


def test_matmul_without_inner_dim_or_rows(device):
    """No products: zeros; no rows: nothing."""
    q, scale = (torch.empty(3, 0, device=device).to(torch.float8_e4m3fn), torch.ones(3, 1, device=device))
    params = {"a_block": "row", "b_block": "row", "dtype": torch.float32}
    assert not kernel("fp8_matmul")(q, scale, q, scale, **params).any()
    empty, none = torch.empty(0, 16, device=device).to(torch.float8_e4m3fn), torch.ones(0, 1, device=device)
    assert kernel("fp8_matmul")(empty, none, empty, none, **params).shape == (0, 0)


def test_kernels_refuse_in_words(device):
    """Why, for what they have no room or no arithmetic for."""
    with pytest.raises(KernelError, match=r"torch\.float64"):
        kernel("quantise_fp8")(torch.zeros(2, 4, dtype=torch.float64, device=device), block="row")
    q, scale = kernel("quantise_fp8")(torch.ones(2, 20, device=device), block="row")
    with pytest.raises(KernelError, match="rows of 20 bytes"):
        kernel("fp8_matmul")(q, scale, q, scale, a_block="row", b_block="row", dtype=torch.float32)
    with pytest.raises(KernelError, match="blocks row by 1x128"):
        kernel("fp8_matmul")(q, scale, q, scale, a_block="row", b_block="1x128", dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", PAIRS, ids=str)
def test_products_at_the_size_of_a_model(blocks, make_tensor):
    """2048 x 4096 x 1536: near the product of what the operands stand for, and the same bits twice."""
    (x, w), params = (make_tensor((2048, 4096)), make_tensor((1536, 4096))), {"a_block": blocks[0], "b_block": blocks[1]}
    (a, a_scale), (b, b_scale) = (kernel("quantise_fp8")(m, block=block) for m, block in zip((x, w), blocks, strict=True))
    wide = [
        kernel("dequantise_fp8")(q, scale, block=block, dtype=torch.float32).double()
        for q, scale, block in ((a, a_scale, blocks[0]), (b, b_scale, blocks[1]))
    ]
    runs = [kernel("fp8_matmul")(a, a_scale, b, b_scale, **params, dtype=torch.float32) for _ in range(2)]
    testing.assert_close(runs[0], wide[0] @ wide[1].T, name="y", rtol=2e-3)
    assert torch.equal(*runs)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_quantise_at_the_size_of_a_model(block, make_tensor):
    """4096 x 8192 and its transpose: what the reference gives, bit for bit."""
    x = make_tensor((4096, 8192), torch.bfloat16)
    wanted = implementation("quantise_fp8_both")(x, block=block)
    for actual, expected in zip(kernel("quantise_fp8_both")(x, block=block), wanted, strict=True):
        same(actual, expected.cpu(), block)
