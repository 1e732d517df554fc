"""Packed matrix: a weight that does not change, in the blocks in which oneDNN's products on a CPU read it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpar.torch_private import map_tensors, no_torch_function, onednn_linear, onednn_pack, onednn_packs

__all__ = ["PackedMatrix", "pack_matrices", "pack_matrix"]

_FEWEST_ROWS = 4
"""Fewer rows are padded to so many: for most matrices oneDNN takes longer for one row than for four."""


class PackedMatrix(Tensor):
    """A weight whose product with a few rows is fast. Einsum multiplies with its blocks. Any other op reads the plain weight,
    which is put together anew each time unless it was kept.

    given:   the dims that a product sums over, in their order.
    columns: which columns of the product with the blocks are its own; None for all.
    """

    blocks: Tensor
    given: tuple[int, ...]
    kept: Tensor | None
    columns: slice | None

    @staticmethod
    def __new__(
        cls, blocks: Tensor, given: tuple[int, ...], like: Tensor, kept: Tensor | None, columns: slice | None = None
    ) -> "PackedMatrix":
        """A weight with the shape and strides of `like`."""
        x = Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        x.blocks, x.given, x.kept, x.columns = blocks, given, kept, columns
        return x

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Call any op of torch with the plain weight."""
        args, kwargs = map_tensors(lambda x: x.plain() if isinstance(x, PackedMatrix) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def plain(self) -> Tensor:
        """The weight with all its dims."""
        return self.blocks_as_plain() if self.kept is None else self.kept

    def blocks_as_plain(self) -> Tensor:
        """The weight put together from its blocks."""
        order, dense = _result_first(self.ndim, self.given), self.blocks.to_dense()
        own = dense if self.columns is None else dense[self.columns]
        return own.view([self.shape[dim] for dim in order]).permute([order.index(d) for d in range(self.ndim)])

    def einsum(self, a: Tensor, in_a: str, in_b: str, output: str) -> Tensor | None:
        """The product by the equation `in_a,in_b->output`; None if it is no product of rows with the matrix that was packed."""
        plan = _plan(in_a, in_b, output, self.given, self.shape)
        if plan is None:
            return None
        num_rows_dims, columns = plan
        y = self.product(a.reshape(-1, self.blocks.shape[1]))
        y = y if self.columns is None else y[:, self.columns]
        return y.reshape(*a.shape[:num_rows_dims], *columns)

    def product(self, rows: Tensor) -> Tensor:
        """The product of rows (R, inner) with all blocks."""
        missing = _FEWEST_ROWS - rows.shape[0]
        if missing <= 0:
            return onednn_linear(rows, self.blocks)
        return onednn_linear(pad(rows, (0, 0, 0, missing)), self.blocks)[: rows.shape[0]]

    def are_all_columns(self, parts: Sequence[Tensor]) -> bool:
        """Whether `parts` are all columns of its blocks, in their order."""
        place = 0
        for part in parts:
            columns = part.columns if type(part) is PackedMatrix and part.blocks is self.blocks else None
            if columns is None or columns.start != place:
                return False
            place = columns.stop
        return place == self.blocks.shape[0]


@functools.lru_cache(maxsize=256)
def _plan(in_a: str, in_b: str, output: str, given: tuple[int, ...], shape: Sequence[int]) -> tuple[int, list[int]] | None:
    """The number of leading dims of the operand that the result has too, and the sizes of the dims behind them."""
    inner = "".join(in_b[dim] for dim in given)
    columns = "".join(c for dim, c in enumerate(in_b) if dim not in given)
    rows = in_a.removesuffix(inner)
    if in_a != rows + inner or output != rows + columns:
        return None
    return len(rows), [shape[in_b.index(c)] for c in columns]


def pack_matrix(weight: Tensor, given: tuple[int, ...], *, keep: bool = False) -> Tensor:
    """The weight for products that sum over its dims `given`; unchanged if torch has no such products for it.

    keep: the plain weight is kept too, for ops that read it in other ways.
    """
    if weight.device.type != "cpu" or not onednn_packs(weight.dtype):
        return weight
    order = _result_first(weight.ndim, given)
    columns = math.prod(weight.shape[dim] for dim in order[: -len(given)])
    blocks = onednn_pack(weight.detach().permute(order).reshape(columns, -1))
    return PackedMatrix(blocks, given, weight, weight if keep else None)


def pack_matrices(weights: Sequence[Tensor], num_summed: int) -> list[Tensor] | None:
    """Weights whose first `num_summed` dims products sum over, packed as one; None if torch has no such products for them."""
    if weights[0].device.type != "cpu" or not onednn_packs(weights[0].dtype):
        return None
    matrices = [w.detach().flatten(num_summed).flatten(0, num_summed - 1).T for w in weights]
    blocks, place = onednn_pack(torch.cat(matrices)), 0
    packed: list[Tensor] = []
    for weight, matrix in zip(weights, matrices, strict=True):
        columns, place = slice(place, place + len(matrix)), place + len(matrix)
        packed.append(PackedMatrix(blocks, tuple(range(num_summed)), weight, None, columns))
    return packed


def _result_first(ndim: int, given: tuple[int, ...]) -> list[int]:
    return [*(dim for dim in range(ndim) if dim not in given), *given]
