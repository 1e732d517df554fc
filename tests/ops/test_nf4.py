"""nf4 and int8: the bytes of bitsandbytes, arithmetic in float64 beside, shards, and what is refused."""

from dataclasses import replace

import pytest
import torch
from bitsandbytes import functional

from mpar import ops, testing, tree
from mpar.errors import DtypeError, ShapeError
from mpar.ops._int8 import dequantise_int8_p
from mpar.ops._nf4 import dequantise_nf4_p
from mpar.sharding import check_primitive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(shape, dtype=torch.float32, seed=0):
    return (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def bits(x):
    return x.view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 1024), (3, 64), (40, 4096)], ids=str)  # 64: one block a row; (3, 64): a part of a nested
def test_bytes_are_those_of_bitsandbytes(shape, dtype):
    """Codes, codes of magnitudes, nested magnitudes and offset; and what they stand for."""
    w = weight(shape, dtype)
    codes, state = functional.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
    parts = ops.quantise_nf4(w)
    assert torch.equal(parts.codes.reshape(-1, 1), codes)
    assert torch.equal(parts.absmax.flatten(), state.absmax)
    assert torch.equal(bits(parts.nested), state.state2.absmax)
    assert torch.equal(bits(parts.offset), state.offset)
    assert torch.equal(ops.dequantise_nf4(parts, dtype=dtype), functional.dequantize_4bit(codes, state))
    assert torch.equal(torch.tensor(ops.nf4_scale_codes()), state.state2.code)
    assert torch.equal(torch.tensor(ops.NF4_CODES), state.code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_that_of_bitsandbytes(dtype):
    """Codes, the magnitudes of rows, and what they stand for."""
    w = weight((30, 96), dtype)
    codes, absmax, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(w)
    parts = ops.quantise_int8(w)
    assert torch.equal(parts.codes, codes) and torch.equal(bits(parts.absmax), absmax)
    assert torch.equal(ops.dequantise_int8(parts), torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, absmax))


def test_dequantised_is_the_published_formula():
    """code * (scale code * nested + offset), element by element in float64; expert by expert if there are experts."""
    parts = ops.quantise_nf4(weight((2, 9, 2048)))
    nested, offset, scales = bits(parts.nested).double(), bits(parts.offset).double(), ops.nf4_scale_codes()
    expected = torch.empty(2, 9, 2048, dtype=torch.float64)
    for e in range(2):
        for i in range(9 * 2048):
            byte = int(parts.codes[e].flatten()[i // 2])
            code = ops.NF4_CODES[byte >> 4 if i % 2 == 0 else byte & 15]
            scale = scales[int(parts.absmax[e].flatten()[i // 64])] * nested[e, i // 64 // 256] + offset[e]
            expected[e, i // 2048, i % 2048] = code * scale
    testing.assert_close(ops.dequantise_nf4(parts), expected, name="weight")
    alone = ops.dequantise_nf4(tree.map_leaves(lambda part: part[1], parts))
    assert torch.equal(ops.dequantise_nf4(parts)[1], alone)


def test_a_weight_takes_4_127_bits():
    """Of a matrix of a 7B model."""
    parts = ops.nf4_shapes((4096, 11008))
    bits_of_weight = 8 * sum(part.nbytes for part in tree.leaves(parts)) / (4096 * 11008)
    assert round(bits_of_weight, 3) == 4.127


def test_the_error_is_that_of_the_paper():
    """Of normal numbers the root of the mean square of the error is 0.09 of their deviation in nf4, and 0.01 in int8."""
    w = torch.randn(512, 1024, generator=torch.Generator().manual_seed(3))
    for parts, dequantise, low, high in (
        (ops.quantise_nf4(w), ops.dequantise_nf4, 0.085, 0.1),
        (ops.quantise_int8(w), ops.dequantise_int8, 0.005, 0.012),
    ):
        assert low < (dequantise(parts) - w).square().mean().sqrt() < high


def test_blocks_of_zeros_stay_zero():
    """They have no magnitude to divide by."""
    w = weight((4, 128))
    w[1] = 0.0
    assert ops.dequantise_nf4(ops.quantise_nf4(w))[1].abs().max() < 1e-3 * w.abs().max()  # the magnitude itself is rounded
    assert not ops.dequantise_int8(ops.quantise_int8(w))[1].any()
    assert not ops.dequantise_nf4(ops.quantise_nf4(torch.zeros(2, 64))).any()


def test_shards_are_of_the_whole():
    """Rows and blocks of columns may be sharded, also both; every shard finds its own among the nested magnitudes."""
    whole = {"dtype": torch.float64, "row_blocks": 16, "starts": [0, 0]}
    tried = check_primitive(dequantise_nf4_p, tree.leaves(ops.quantise_nf4(weight((64, 1024)))), whole)
    assert {"r", "c"} <= set(tried)
    tried = check_primitive(dequantise_int8_p, tree.leaves(ops.quantise_int8(weight((8, 8)))), {"dtype": torch.float64})
    assert {"r", "c"} <= set(tried)


def test_wrong_operands_are_refused():
    """Rows that are no whole blocks, integers to quantise, parts that do not fit each other."""
    with pytest.raises(ShapeError, match="C a multiple of 64"):
        ops.quantise_nf4(weight((4, 96)))
    for quantise in (ops.quantise_nf4, ops.quantise_int8):
        with pytest.raises(DtypeError, match="must be floating"):
            quantise(torch.ones(4, 64, dtype=torch.int64))
    parts = ops.quantise_nf4(weight((4, 128)))
    with pytest.raises(ShapeError, match=r"\(R, C / 2\), \(R, C / 64\)"):
        ops.dequantise_nf4(replace(parts, absmax=parts.absmax[:2]))
    with pytest.raises(DtypeError, match="two of int32"):
        ops.dequantise_nf4(replace(parts, nested=bits(parts.nested)))
    whole = ops.quantise_int8(weight((4, 128)))
    with pytest.raises(ShapeError, match=r"\(\.\.\., R\)"):
        ops.dequantise_int8(replace(whole, absmax=whole.absmax[:2]))
    with pytest.raises(DtypeError, match="int8, and int32"):
        ops.dequantise_int8(replace(whole, codes=whole.codes.long()))
