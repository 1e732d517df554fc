"""nf4: weights as 4-bit codes with double quantisation (Dettmers et al. 2023, arXiv:2305.14314, section 3).

A matrix (R, C) is cut along its rows into blocks of 64. Each weight is the code number that is nearest to it after division by
the largest magnitude of its block. These magnitudes, less their mean, are quantised themselves, in blocks of 256, to 8 bits. A
weight takes 4.127 bits. The layout is that of bitsandbytes, byte for byte.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import DtypeError, ShapeError
from mpar.ops.primitive import Cost, Primitive
from mpar.tree import Leaf, struct

__all__ = ["NF4_BLOCK", "NF4_CODES", "Nf4", "dequantise_nf4", "nf4_scale_codes", "nf4_shapes", "quantise_nf4"]

NF4_BLOCK = 64
"""How many neighbours in a row share a magnitude."""
NESTED_BLOCK = 256  # how many magnitudes share one in turn
_PLACES = 32767.5
NF4_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen numbers that 4-bit codes stand for: quantiles of a normal distribution, appendix E of the paper."""

dequantise_nf4_p = Primitive(
    "dequantise_nf4", "codes, absmax, nested, offset -> w", dtype="ScalarType", row_blocks="int", starts="int[]"
)


@struct
class Nf4(Generic[Leaf]):
    """A quantised matrix (R, C), or one for each expert, whose count is then the first dim of everything.

    codes:  uint8 (R, C / 2), two codes a byte, the first in the high bits.
    absmax: uint8 (R, C / 64), the codes of the magnitudes of blocks.
    nested: int32 (R * C / 64 / 256, rounded up): the bits of float32, the magnitudes of the blocks of `absmax`.
    offset: int32 (): the bits of the mean magnitude.
    """

    codes: Leaf
    absmax: Leaf
    nested: Leaf
    offset: Leaf


@functools.cache
def nf4_scale_codes() -> tuple[float, ...]:
    """The 256 numbers, ascending, that codes of magnitudes stand for: an exponent and a linear fraction in 7 bits, and a sign
    (Dettmers 2016, arXiv:1511.04561, section 2.3)."""
    data = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10.0 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        data += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(data))


def nf4_shapes(shape: Sequence[int]) -> Nf4[Tensor]:
    """The parts of a matrix of `shape`, (R, C) or (E, R, C), as tensors without data. Raises ShapeError if rows are not whole
    blocks."""
    *lead, rows, columns = shape
    if len(lead) > 1 or columns % NF4_BLOCK:
        raise ShapeError(
            f"cannot quantise {tuple(shape)} to nf4: it must be (R, C) or (E, R, C), and C a multiple of {NF4_BLOCK}"
        )
    blocks = columns // NF4_BLOCK

    def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*lead, *sizes, dtype=dtype, device="meta")

    return Nf4(
        empty(rows, columns // 2, dtype=torch.uint8),
        empty(rows, blocks, dtype=torch.uint8),
        empty(-(-rows * blocks // NESTED_BLOCK), dtype=torch.int32),
        torch.empty(lead, dtype=torch.int32, device="meta"),
    )


def quantise_nf4(w: Tensor) -> Nf4[Tensor]:
    """The matrix `w` (R, C), or the matrices (E, R, C), in nf4. It is computed in float32. Raises ShapeError or DtypeError."""
    nf4_shapes(w.shape)
    if not w.is_floating_point():
        raise DtypeError(f"cannot quantise a weight of {w.dtype} to nf4: it must be floating")
    if w.ndim == 3:
        first, *others = (_quantise(expert) for expert in w)
        return tree.map_leaves(lambda *tensors: torch.stack(tensors), first, *others)
    return _quantise(w)


def _quantise(w_RC: Tensor) -> Nf4[Tensor]:
    scaled, absmax = _scaled(w_RC.reshape(-1, NF4_BLOCK).float())
    codes = _nearest(scaled, NF4_CODES).view(w_RC.shape)
    offset = absmax.mean()
    padding = -len(absmax) % NESTED_BLOCK
    centred = torch.nn.functional.pad(absmax - offset, (0, padding)).view(-1, NESTED_BLOCK)
    scaled, nested = _scaled(centred)
    # bitsandbytes looks codes up in a table of 65536 places in [-1, 1], so that near a midpoint it may take the farther code
    places = ((scaled + 1) * _PLACES + 0.5).floor() / _PLACES - 1
    scale_codes = _nearest(places, nf4_scale_codes()).view(-1)[: len(absmax)]
    return Nf4(
        codes[:, ::2] << 4 | codes[:, 1::2],
        scale_codes.view(len(w_RC), -1),
        nested.view(torch.int32),
        offset.view(torch.int32),
    )


def _scaled(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Each block divided by its largest magnitude, and these magnitudes. Blocks of zeros stay zero."""
    absmax = blocks.abs().amax(1)
    return (blocks * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp(-1, 1), absmax


def _nearest(x: Tensor, codes: Sequence[float]) -> Tensor:
    """The index of the nearest code, uint8; halfway between two codes it is the lower one."""
    numbers = torch.tensor(codes, dtype=torch.float32, device=x.device)
    return torch.bucketize(x.contiguous(), (numbers[:-1] + numbers[1:]) / 2).to(torch.uint8)


def dequantise_nf4(parts: Nf4[Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix or matrices in `dtype`, computed in float32. They have no gradient. Raises ShapeError or DtypeError."""
    operands = parts.codes, parts.absmax, parts.nested, parts.offset
    return dequantise_nf4_p.bind(*operands, dtype=dtype, row_blocks=parts.absmax.shape[-1], starts=[0, 0])


@dequantise_nf4_p.def_abstract
def _abstract(codes, absmax, nested, offset, *, dtype, row_blocks, starts):
    shapes = tuple(codes.shape), tuple(absmax.shape), tuple(nested.shape), tuple(offset.shape)
    *lead, rows, width = shapes[0]
    fits = (*lead, rows, 2 * width // NF4_BLOCK) == shapes[1] and not 2 * width % NF4_BLOCK
    if not fits or shapes[2][:-1] != tuple(lead) or shapes[3] != tuple(lead) or len(lead) > 1:
        raise ShapeError(
            f"dequantise_nf4: codes, absmax, nested and offset are {shapes}; they must be (R, C / 2), (R, C / {NF4_BLOCK}), (n,) "
            "and (), with the same number of experts before them if there are experts"
        )
    if [x.dtype for x in (codes, absmax, nested, offset)] != [torch.uint8, torch.uint8, torch.int32, torch.int32]:
        raise DtypeError(
            f"dequantise_nf4: the parts are {[x.dtype for x in (codes, absmax, nested, offset)]}; they must be two of uint8, "
            "then two of int32, which are the bits of float32"
        )
    return torch.empty((*lead, rows, 2 * width), dtype=dtype, device=codes.device)


@dequantise_nf4_p.def_impl
def _impl(
    codes: Tensor,
    absmax: Tensor,
    nested: Tensor,
    offset: Tensor,
    *,
    dtype: torch.dtype,
    row_blocks: int,
    starts: Sequence[int],
) -> Tensor:
    rows, blocks = absmax.shape[-2:]
    row = torch.arange(starts[0], starts[0] + rows, device=codes.device)
    place = row[:, None] * row_blocks + torch.arange(starts[1], starts[1] + blocks, device=codes.device)
    of_block = nested.view(torch.float32)[..., (place // NESTED_BLOCK).flatten()].view(absmax.shape)
    scale = codes.new_tensor(nf4_scale_codes(), dtype=torch.float32)[absmax.long()] * of_block
    scale = scale + offset.view(torch.float32)[..., None, None]
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)
    values = codes.new_tensor(NF4_CODES, dtype=torch.float32)[pairs.long()]
    return (values.view(*absmax.shape, NF4_BLOCK) * scale[..., None]).flatten(-2).to(dtype)


def _sharded(emit, codes, absmax, nested, offset, *, dtype, row_blocks, starts):
    shifts = [emit.start_of("r"), emit.start_of("c")]
    shifted = [shift if start == 0 else emit(operator.add, shift, start) for start, shift in zip(starts, shifts, strict=True)]
    return emit(dequantise_nf4_p, codes, absmax, nested, offset, dtype=dtype, row_blocks=row_blocks, starts=shifted)


# rows are cut anywhere, columns between blocks; every rank has all of `nested`, of which there is one for 16384 weights
dequantise_nf4_p.def_sharding(
    "... r (c h), ... r c, ... k, ... -> ... r (c w)",
    need_replication="h w k",
    sizes=f"h:{NF4_BLOCK // 2} w:{NF4_BLOCK}",
)
for _factor in ("r", "c"):
    dequantise_nf4_p.def_sharded(_factor)(_sharded)
dequantise_nf4_p.def_batching_loop()


@dequantise_nf4_p.def_cost
def _cost(codes, absmax, nested, offset, *, dtype, row_blocks, starts):
    count = 2 * codes.numel()
    read = codes.nbytes + absmax.nbytes + nested.nbytes + offset.nbytes
    return Cost(flops=count + 2 * absmax.numel(), bytes=read + count * dtype.itemsize, workspace=13 * count + 24 * absmax.numel())
