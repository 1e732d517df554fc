"""Rearrange: `"(n h) d -> d n h"` says how a stored tensor (left) becomes a leaf (right); both directions come from it.

A dim on the left is a name or, in brackets, several names that were merged, the first varying slowest. The right has each
name once. Reading asks for the blocks that a slice of the leaf needs and for nothing else.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar.errors import ConfigError

__all__ = ["Rearrange", "parse_rearrange"]

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Rearrange:
    """A parsed transform. `sizes` maps a name to its stored size, which the leaf may exceed by zeros at the end (padding)."""

    stored: tuple[tuple[str, ...], ...]
    leaf: tuple[str, ...]

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return tuple(math.prod(sizes[name] for name in names) for names in self.stored)

    def read(self, fetch: Callable[[tuple[slice, ...]], Tensor], sizes: Mapping[str, int], bounds: Sequence[Bounds]) -> Tensor:
        """The part of the leaf within `bounds` (start and stop of each of its dims), contiguous.

        `fetch` gives a block of the stored tensor; the blocks asked for are disjoint and hold no element that is not used.
        """
        inside = {
            name: (min(start, sizes[name]), min(stop, sizes[name])) for name, (start, stop) in zip(self.leaf, bounds, strict=True)
        }
        runs = [_runs([inside[n] for n in names], [sizes[n] for n in names]) for names in self.stored]
        block = _gather(fetch, runs, ())
        order = [name for names in self.stored for name in names]
        block = block.reshape([inside[name][1] - inside[name][0] for name in order])
        block = block.permute([order.index(name) for name in self.leaf])
        shape = [stop - start for start, stop in bounds]
        if list(block.shape) != shape:
            padded = block.new_zeros(shape)
            padded[tuple(slice(0, size) for size in block.shape)] = block
            return padded
        return block.clone(memory_format=torch.contiguous_format)  # never a view of the mapped file

    def write(self, leaf: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The stored tensor of a whole leaf, contiguous and without padding."""
        cut = leaf[tuple(slice(0, sizes[name]) for name in self.leaf)]
        order = [name for names in self.stored for name in names]
        return cut.permute([self.leaf.index(name) for name in order]).reshape(self.stored_shape(sizes)).contiguous()


@functools.cache
def parse_rearrange(text: str) -> Rearrange:
    """Parse `"(n h) d -> d n h"`. Raises ConfigError if it is not of this form, or the sides do not have the same names."""
    form = r"\s*(?:(?:\w+|\([\w\s]+\))\s+)*->(?:\s+\w+)*\s*"
    if not re.fullmatch(form, text):
        raise ConfigError(f"cannot parse transform {text!r}: write it as '(n h) d -> d n h', with names on the right")
    left, right = text.split("->")
    stored = tuple(tuple(group.split()) if group else (name,) for group, name in re.findall(r"\(([^)]*)\)|(\w+)", left))
    leaf = tuple(right.split())
    names = [name for dim in stored for name in dim]
    if sorted(names) != sorted(set(leaf)) or len(leaf) != len(set(leaf)) or not all(stored):
        raise ConfigError(f"cannot use transform {text!r}: each name must be once on the left and once on the right")
    return Rearrange(stored, leaf)


def _runs(bounds: Sequence[Bounds], sizes: Sequence[int]) -> list[Bounds]:
    """The contiguous ranges of a merged dim that `bounds` of its names select, ascending."""
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
