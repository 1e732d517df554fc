"""Copies a block of a shard out of the shard's bytes, in ascending order and with little memory, whichever dims are cut."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.checkpoint._layout import BLOCK_BYTES, Box

__all__ = ["AT_ONCE_BYTES", "boxes", "bytes_of", "copy_box"]

AT_ONCE_BYTES = 2**22
"""A read or write asks for so many bytes at most, which bounds what is held besides the tensors."""


def bytes_of(x: Tensor) -> memoryview:
    """The bytes of `x`, a contiguous CPU tensor; writing to them changes it."""
    return x.reshape(-1).view(torch.uint8).numpy().data


def copy_box(shape: tuple[int, ...], box: Box, target: Tensor, fill: Callable[[memoryview, int], None]) -> None:
    """Fill `target`, a CPU tensor of the shape of `box`, with the block `box` of a row-major tensor of `shape` and the same
    dtype.

    fill:  fills a view with the tensor's bytes from one of them on; the calls ask for them in ascending order.
    """
    if math.prod(target.shape) == 0:
        return
    if not shape:
        shape, box, target = (1,), ((0, 1),), target.reshape(1)  # a view: it is one element
    for slab in _slabs(shape, box, target.dtype.itemsize):
        place = target[slab.place]
        whole = slab.inner == tuple(slice(0, size) for size in slab.shape[1:])
        rows = place if whole and place.is_contiguous() else torch.empty(slab.shape, dtype=target.dtype)
        fill(bytes_of(rows), slab.begin)
        if rows is not place:
            place.copy_(rows[(slice(None), *slab.inner)])


def boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Boxes of at most `AT_ONCE_BYTES` that cover a tensor of `shape` exactly once, in row-major order."""
    if math.prod(shape) == 0:
        return
    if not shape:
        yield ()
        return
    for slab in _slabs(shape, tuple((0, size) for size in shape), itemsize):
        outer = tuple((dim.start, dim.stop - dim.start) if isinstance(dim, slice) else (dim, 1) for dim in slab.place)
        yield (*outer, *((0, size) for size in shape[len(outer) :]))


@dataclass(frozen=True)
class _Slab:
    """Consecutive rows of a tensor: their first byte, their shape, which part of each row is wanted (`inner`),
    and where it belongs in the target."""

    begin: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    place: tuple[int | slice, ...]


def _slabs(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[_Slab]:
    """The rows that hold `box`, in ascending order. A row is an index of the outermost dim of which one index is at most a block
    to check, so what lies between two wanted parts of rows is not worth leaving out.
    """
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= BLOCK_BYTES)
    row = math.prod(shape[dim + 1 :]) * itemsize
    at_once = max(1, AT_ONCE_BYTES // max(row, 1))
    first, count = box[dim]
    inner = tuple(slice(start, start + size) for start, size in box[dim + 1 :])
    for leading in itertools.product(*(range(size) for _, size in box[:dim])):
        index = 0
        for (start, _), i, size in zip(box[:dim], leading, shape[:dim], strict=True):
            index = index * size + start + i
        for start in range(0, count, at_once):
            rows = min(at_once, count - start)
            begin = (index * shape[dim] + first + start) * row
            yield _Slab(begin, (rows, *shape[dim + 1 :]), inner, (*leading, slice(start, start + rows)))
