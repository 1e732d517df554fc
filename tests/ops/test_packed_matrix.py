"""Packed matrices: products with them are those with the plain weight, and any other op reads the plain weight."""

import pytest
import torch

from mpar import ops
from mpar.testing import assert_close
from mpar.torch_private import onednn_packs

CASES = {
    "bsd,dnh->bsnh": ((2, 3, 8), (8, 4, 2), (0,)),
    "bsnh,nhd->bsd": ((2, 3, 4, 2), (4, 2, 8), (0, 1)),
    "bsd,vd->bsv": ((2, 3, 8), (5, 8), (1,)),
    "bsd,df->fbs": ((2, 3, 8), (8, 5), (0,)),  # no product that the blocks give
}


@pytest.mark.parametrize("keep", [False, True], ids=("blocks", "kept"))
@pytest.mark.parametrize("equation", CASES)
def test_products_are_those_of_the_plain_weight(equation, keep):
    """Einsum of bfloat16, against float64; a weight with unlike strides too."""
    shape, weight_shape, given = CASES[equation]
    x = torch.randn(shape).bfloat16()
    row_by_row = torch.randn(weight_shape).bfloat16()
    for weight in (row_by_row, row_by_row.movedim(0, -1).contiguous().movedim(-1, 0)):
        packed = ops.pack_matrix(weight, given, keep=keep)
        assert isinstance(packed, ops.PackedMatrix) == onednn_packs(torch.bfloat16)
        assert (packed.shape, packed.dtype, packed.device) == (weight.shape, weight.dtype, weight.device)
        assert torch.equal(packed + 0, weight), "another op reads the plain weight"
        y = ops.PRIMITIVES["einsum"].meaning(x, packed, equation=equation)
        assert_close(y, torch.einsum(equation, x.double(), weight.double()), name="y")


def test_rows_of_a_product_do_not_depend_on_others():
    """The bits of a row are those that it has alone."""
    weight, x = torch.randn(96, 4, 16).bfloat16(), torch.randn(1, 16, 96).bfloat16()
    packed, einsum = ops.pack_matrix(weight, (0,)), ops.PRIMITIVES["einsum"].meaning
    together = einsum(x, packed, equation="bsd,dnh->bsnh")
    for row in range(16):
        alone = torch.zeros_like(x)
        alone[:, row] = x[:, row]
        assert torch.equal(einsum(alone, packed, equation="bsd,dnh->bsnh")[:, row], together[:, row])


def test_other_dtypes_stay_plain():
    """What torch multiplies as fast as it is."""
    weight = torch.randn(8, 5)
    assert ops.pack_matrix(weight, (0,)) is weight
