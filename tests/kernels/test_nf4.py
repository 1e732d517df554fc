"""The kernel of nf4, against arithmetic in float64 and against the reference."""

import pytest
import torch

from mpar import ops, testing, tree
from mpar.errors import KernelError
from mpar.kernels import implementation
from mpar.ops._nf4 import dequantise_nf4_p

SHAPES = [(9, 192), (1, 64), (70, 448), (3, 5, 320)]  # rows and blocks that do not fill a tile; three experts


def parts_of(shape, make_tensor, device):
    """Codes of weights whose blocks differ in size, on the device of the tests."""
    w = make_tensor(shape).cpu() * torch.logspace(-2, 1, shape[-2])[:, None]
    return tree.map_leaves(lambda part: part.to(device), ops.quantise_nf4(w))


def kernel(parts, dtype, starts=(0, 0), row_blocks=None):
    operands = tree.leaves(parts)
    blocks = parts.absmax.shape[-1] if row_blocks is None else row_blocks
    return implementation("dequantise_nf4", "triton")(*operands, dtype=dtype, row_blocks=blocks, starts=list(starts))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_float64(shape, dtype, make_tensor, device):
    """Every weight is its number times the magnitude of its block."""
    parts = parts_of(shape, make_tensor, device)
    on_host = tree.map_leaves(lambda part: part.cpu(), parts)
    nested, offset = (part.view(torch.float32).double() for part in (on_host.nested, on_host.offset))
    blocks = torch.arange(shape[-2] * shape[-1] // 64) // 256
    scales = torch.tensor(ops.nf4_scale_codes()).double()[on_host.absmax.long()]
    scales = scales * nested[..., blocks].reshape(scales.shape) + offset[..., None, None]
    codes = torch.stack([on_host.codes >> 4, on_host.codes & 15], -1).flatten(-2)
    expected = torch.tensor(ops.NF4_CODES).double()[codes.long()] * scales.repeat_interleave(64, -1)
    testing.assert_close(kernel(parts, dtype).cpu(), expected, name="weight")


def test_a_shard_is_a_part_of_the_whole(make_tensor, device):
    """A shard of rows and of blocks finds its own among the nested magnitudes."""
    parts = parts_of((64, 1024), make_tensor, device)
    shard = ops.Nf4(parts.codes[40:, 256:].contiguous(), parts.absmax[40:, 8:].contiguous(), parts.nested, parts.offset)
    whole = dequantise_nf4_p.meaning(*tree.leaves(parts), dtype=torch.float32, row_blocks=16, starts=[0, 0])
    testing.assert_close(kernel(shard, torch.float32, (40, 8), 16), whole[40:, 512:], name="shard")


def test_what_it_does_not_support(make_tensor, device):
    """float64 is refused with the reason."""
    with pytest.raises(KernelError, match="kernels compute in float32"):
        kernel(parts_of((1, 64), make_tensor, device), torch.float64)
