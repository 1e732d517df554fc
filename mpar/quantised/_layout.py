"""Layout: how a leaf of a model is a matrix (result, given), as torch.nn.Linear stores it, and how the parts of its codes lie.

The parts keep the dims of the leaf, with their logical axes, so that a strategy shards them as it would shard the weight. Only
the last of the given dims is shorter; and where it is not made of whole blocks, all given dims are merged to one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mpar import ops
from mpar.chain import Axes
from mpar.errors import ConfigError
from mpar.models import MatrixLeaf
from mpar.ops import NF4_BLOCK, Int8, Nf4

__all__ = ["Kind", "Layout", "Parts", "check_kind", "layout_of"]

Kind = Literal["nf4", "int8"]
_MANY_BLOCKS = 16
_ONLY_STORED = ("embed",)
"""Logical axes along which strategies shard what is stored, but not what is used. Magnitudes, a byte for 64 weights, are
sharded along them only where there are multiples of 16 blocks: the number of ranks has to divide that of the blocks."""
Parts = Nf4[Tensor] | Int8[Tensor]


def check_kind(kind: str) -> None:
    """Raise ConfigError unless weights can be quantised in this way."""
    if kind not in get_args(Kind):
        raise ConfigError(f"cannot quantise weights to {kind!r}: choose {' or '.join(get_args(Kind))}")


@dataclass(frozen=True)
class Layout:
    """A leaf as a matrix.

    shape:  of the leaf.
    expert: its dim that counts experts, None without. result, given: its dims that are the rows and the columns of the matrix,
            major first.
    """

    kind: Kind
    shape: tuple[int, ...]
    expert: int | None
    result: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(R, C), or (E, R, C)."""
        sizes = (math.prod(self.shape[dim] for dim in dims) for dims in (self.result, self.given))
        return (*self._lead(self.shape), *sizes)

    def quantise(self, leaf: Tensor) -> Parts:
        """The parts of a leaf, all of which is given."""
        matrix = leaf.permute(self._order).reshape(self.matrix_shape)
        return self.spread(ops.quantise_nf4(matrix) if self.kind == "nf4" else ops.quantise_int8(matrix))

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The leaf in `dtype`."""
        flat = self.flattened(parts)
        matrix = ops.dequantise_nf4(flat, dtype=dtype) if isinstance(flat, Nf4) else ops.dequantise_int8(flat, dtype=dtype)
        order = self._order
        return matrix.reshape([self.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])

    def meta(self) -> Parts:
        """The parts as tensors without data."""
        if self.kind == "nf4":
            return self.spread(ops.nf4_shapes(self.matrix_shape))
        codes = torch.empty(self.matrix_shape, dtype=torch.int8, device="meta")
        return self.spread(Int8(codes, torch.empty(self.matrix_shape[:-1], dtype=torch.int32, device="meta")))

    def axes(self, leaf: Axes) -> Nf4[Axes] | Int8[Axes]:
        """The logical axes of the parts of a leaf that has these."""
        rows = (*self._lead(leaf), *(leaf[dim] for dim in self.result))
        columns = [leaf[dim] for dim in self.given] if self._keeps_columns else [leaf[self.given[0]]]
        if self.kind == "int8":
            return Int8((*rows, *columns), rows)
        lead, few = self._lead(leaf), self.matrix_shape[-1] // NF4_BLOCK % _MANY_BLOCKS
        magnitudes = [None if few and name in _ONLY_STORED else name for name in columns]
        return Nf4((*rows, *columns), (*rows, *magnitudes), (*lead, None), lead)

    def flattened(self, parts: Parts) -> Parts:
        """The parts of the matrix, as `mpar.ops` has them."""
        *lead_and_rows, _ = self.matrix_shape

        def flat(x: Tensor, num_columns: int) -> Tensor:
            return x.reshape([*lead_and_rows, -1][: len(lead_and_rows) + num_columns])

        if isinstance(parts, Nf4):
            return Nf4(flat(parts.codes, 1), flat(parts.absmax, 1), parts.nested, parts.offset)
        return Int8(flat(parts.codes, 1), flat(parts.absmax, 0))

    def spread(self, parts: Parts) -> Parts:
        """The parts with the dims of the leaf."""
        rows = [*self._lead(self.shape), *(self.shape[dim] for dim in self.result)]
        inner = [self.shape[dim] for dim in self.given[:-1]] if self._keeps_columns else []
        if isinstance(parts, Nf4):
            codes, absmax = (x.reshape([*rows, *inner, -1]) for x in (parts.codes, parts.absmax))
            return Nf4(codes, absmax, parts.nested, parts.offset)
        return Int8(parts.codes.reshape([*rows, *inner, -1]), parts.absmax.reshape(rows))

    @property
    def _keeps_columns(self) -> bool:
        """Whether the last of the given dims is made of whole blocks."""
        return self.kind == "int8" or self.shape[self.given[-1]] % NF4_BLOCK == 0

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self._lead(range(len(self.shape))), *self.result, *self.given)

    def _lead(self, of_dims: Sequence) -> tuple:
        return () if self.expert is None else (of_dims[self.expert],)


def layout_of(kind: Kind, leaf: MatrixLeaf, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of the leaf of a matrix; `shapes` has the shapes of all leaves by path."""
    expert = None if leaf.expert is None else leaf.dims.index(leaf.expert)
    result, given = (tuple(leaf.dims.index(name) for name in leaf.stored_order(side)) for side in ("result", "given"))
    return Layout(kind, shapes[leaf.path], expert, result, given)
