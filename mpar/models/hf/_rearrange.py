"""Rearrange: `"(n h) d -> d n h"` says how a stored tensor (left) becomes a leaf (right), and also how a leaf is stored.

A dim on the left is a name or, in brackets, several names that are merged, the first varying slowest; a 1 is a dim of size 1 that
the leaf does not have. The right side has each name once. Several leaves may be stored in one tensor:
    `+(n h) d -> d n h`    the leaf is a slice of the dim with the plus, along which all the leaves stand one after the other;
    `e d (f +) -> e d f`   the plus is one more factor of the dim, with an index for each leaf: here the leaves alternate.
Reading a slice of a leaf reads only the blocks that it needs.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.errors import ConfigError

__all__ = ["WHOLE", "Place", "Rearrange", "parse_rearrange"]

Bounds = tuple[int, int]
PART, ONE = "+", "1"


@dataclass(frozen=True)
class Place:
    """Where a leaf is in its stored tensor: it is leaf `index` of `count`, from `offset` on in a joined dim of size `total`."""

    index: int = 0
    count: int = 1
    offset: int = 0
    total: int | None = None


WHOLE = Place()


@dataclass(frozen=True)
class Rearrange:
    """A parsed transform: the names of each stored dim, the names of the leaf's dims, and the stored dim with a plus before it.

    The `sizes` of its methods map each name to its stored size; the leaf may be larger, with zeros at the end (padding).
    """

    stored: tuple[tuple[str, ...], ...]
    leaf: tuple[str, ...]
    joined: int | None = None

    @property
    def is_part(self) -> bool:
        """Whether the stored tensor holds other leaves too."""
        return self.joined is not None or any(PART in names for names in self.stored)

    def part_shape(self, sizes: Mapping[str, int], place: Place = WHOLE) -> tuple[int, ...]:
        """The shape of the leaf's slice of the stored tensor: that of the tensor but for a joined dim."""
        sizes = {**sizes, PART: place.count, ONE: 1}
        return tuple(math.prod(sizes[name] for name in names) for names in self.stored)

    def stored_shape(self, sizes: Mapping[str, int], place: Place = WHOLE) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        shape = self.part_shape(sizes, place)
        return tuple(place.total or size if dim == self.joined else size for dim, size in enumerate(shape))

    def read(
        self,
        fetch: Callable[[tuple[slice, ...]], Tensor],
        sizes: Mapping[str, int],
        bounds: Sequence[Bounds],
        place: Place = WHOLE,
    ) -> Tensor:
        """The elements of the leaf within `bounds` (start and stop of each of its dims), contiguous.

        `fetch` reads a block of the stored tensor. The blocks that are read are disjoint, and all their elements are used.
        """
        sizes = {**sizes, PART: place.count, ONE: 1}
        inside = {
            name: (min(start, sizes[name]), min(stop, sizes[name])) for name, (start, stop) in zip(self.leaf, bounds, strict=True)
        }
        inside |= {PART: (place.index, place.index + 1), ONE: (0, 1)}
        runs = [_runs([inside[n] for n in names], [sizes[n] for n in names]) for names in self.stored]
        if self.joined is not None:
            runs[self.joined] = [(start + place.offset, stop + place.offset) for start, stop in runs[self.joined]]
        block = _gather(fetch, runs, ())
        order = self._order()
        block = block.reshape([inside[name][1] - inside[name][0] for name in order])
        block = block.permute([order.index(name) for name in self.leaf])
        shape = [stop - start for start, stop in bounds]
        if list(block.shape) != shape:
            padded = block.new_zeros(shape)
            padded[tuple(slice(0, size) for size in block.shape)] = block
            return padded
        return block.clone(memory_format=torch.contiguous_format)  # never a view of the mapped file

    def write(self, stored: Tensor, leaf: Tensor, sizes: Mapping[str, int], place: Place = WHOLE) -> None:
        """Copy a leaf, without its padding, to its place in a stored tensor, which may hold other leaves too."""
        all_sizes = {**sizes, PART: place.count, ONE: 1}
        if self.joined is not None:
            stored = stored.narrow(self.joined, place.offset, self.part_shape(sizes, place)[self.joined])
        names = [name for dim in self.stored for name in dim]
        for dim in reversed(range(len(self.stored))):
            stored = stored.unflatten(dim, [all_sizes[name] for name in self.stored[dim]])
        stored = stored[tuple(place.index if name == PART else 0 if name == ONE else slice(None) for name in names)]
        stored.copy_(self._unpadded(leaf, sizes))

    def _order(self) -> list[str]:
        """The names of the leaf's dims, in the order of the stored tensor."""
        return [name for names in self.stored for name in names if name not in (PART, ONE)]

    def _unpadded(self, leaf: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The leaf without padding, its dims in the stored order."""
        return leaf[tuple(slice(0, sizes[name]) for name in self.leaf)].permute([self.leaf.index(n) for n in self._order()])


@functools.cache
def parse_rearrange(text: str) -> Rearrange:
    """Parse `"(n h) d -> d n h"`. Raises ConfigError if it is not of this form, or if the sides do not have the same names."""
    form = r"\s*(?:\+?(?:\w+|\([\w\s+]+\))\s+)*->(?:\s+\w+)*\s*"
    if not re.fullmatch(form, text):
        raise ConfigError(f"cannot parse transform {text!r}: write it as '(n h) d -> d n h', with names on the right")
    left, right = text.split("->")
    dims = re.findall(r"(\+?)(?:\(([^)]*)\)|(\w+))", left)
    stored = tuple(tuple(group.split()) if group else (name,) for _, group, name in dims)
    joined = [dim for dim, (plus, *_) in enumerate(dims) if plus]
    leaf = tuple(right.split())
    every = [name for dim in stored for name in dim]
    names = [name for name in every if name not in (PART, ONE)]
    if sorted(names) != sorted(set(leaf)) or len(leaf) != len(set(leaf)) or not all(stored):
        raise ConfigError(f"cannot use transform {text!r}: each name must be once on the left and once on the right")
    if len(joined) + every.count(PART) > 1 or any(PART in name and name != PART for name in every):
        raise ConfigError(f"cannot use transform {text!r}: there may be one plus, before a dim or by itself within brackets")
    return Rearrange(stored, leaf, joined[0] if joined else None)


def _runs(bounds: Sequence[Bounds], sizes: Sequence[int]) -> list[Bounds]:
    """The contiguous ranges of a merged dim that the `bounds` of its names select, ascending."""
    runs, stride = [(0, 1)], 1
    for (start, stop), size in zip(reversed(bounds), reversed(sizes), strict=True):
        if runs == [(0, stride)]:
            runs = [(start * stride, stop * stride)]
        else:
            runs = [(i * stride + low, i * stride + high) for i in range(start, stop) for low, high in runs]
        stride *= size
    return [run for run in runs if run[0] < run[1]] or [(0, 0)]


def _gather(fetch: Callable[[tuple[slice, ...]], Tensor], runs: Sequence[Sequence[Bounds]], chosen: tuple[slice, ...]) -> Tensor:
    """Fetch every combination of `runs` and join them, dim by dim."""
    if not runs:
        return fetch(chosen)
    parts = [_gather(fetch, runs[1:], (*chosen, slice(*run))) for run in runs[0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=len(chosen))
