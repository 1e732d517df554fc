"""LowRank: stands for the weight W + s A B of an adapter, and computes products with it without making it.

Hu et al. 2021, arXiv:2106.09685, eq. 3: x (W + s A B) = x W + s (x A) B. With a gain g of each output (DoRA, Liu et al. 2024,
arXiv:2402.09353, eq. 5) it stands for g (W + s A B). Each dim of the weight has a letter. A has those that a product with the
weight sums, and B the others; dims of both count experts, which have matrices of their own.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpar import ops
from mpar.adapters._regroup import Regroup, regroup
from mpar.errors import ConfigError
from mpar.ops import StandIn

__all__ = ["Factor", "LowRank"]

RANK = "R"  # the letter of the dim along which A and B are multiplied; dims of weights have small letters
Drop = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Factor:
    """A tensor, and a letter for each of its dims."""

    value: Tensor
    letters: str

    def ordered(self, letters: str) -> Tensor:
        """The tensor with its dims in the order of `letters`."""
        order = [self.letters.index(c) for c in letters]
        return self.value if order == sorted(order) else self.value.permute(order)


@dataclass(frozen=True, eq=False)
class LowRank(StandIn):
    """The weight `gain * (base + scale * A B)`.

    base:    W, or what stands for it. letters: of its dims.
    a, b:    the factors; both have the letter RANK.
    gain:    a factor for each output, None for 1.
    drop:    dropout of what A is multiplied with; None without.
    gate:    by what the product with A is multiplied in the place of `scale`: for each token of a batch (B, S, R) or, for
             experts, each of their rows (N, R), with 0 for the ranks that belong to adapters of other tokens. None: without.
    """

    base: Any
    letters: str
    a: Factor
    b: Factor
    scale: float
    gain: Factor | None = None
    drop: Drop | None = None
    gate: Tensor | None = None

    @property
    def like(self) -> Tensor:  # type: ignore[override]
        """A tensor without data of its shape and dtype."""
        return torch.empty(self.base.shape, dtype=self.base.dtype, device="meta")

    def tensor(self) -> Tensor:
        """The sum, computed. Raises ConfigError if there is dropout or a gate, which only a product with x has."""
        if self.gate is not None:
            raise ConfigError(
                f"cannot choose the adapter of a weight {tuple(self.shape)} for each row: the weight is used by another op than "
                "a product of tokens.\nMerge the adapter, or exclude these weights (mlp_chunk and logits_chunk make such ops)."
            )
        if self.drop is not None:
            raise ConfigError(
                f"cannot drop what an adapter of a weight {tuple(self.shape)} reads: the weight is used by another op than a "
                "product of tokens.\nUse dropout=0, or exclude these weights (mlp_chunk and logits_chunk make such ops)."
            )
        low = ops.einsum(f"{self.a.letters},{self.b.letters}->{self.letters}", self.a.value, self.b.value)
        summed = self.base + (low * self.scale).to(self.base.dtype)
        return summed if self.gain is None else summed * self._spread(self.gain, self.letters).to(summed.dtype)

    def of_rows(self, rows: Callable[[Tensor], Tensor]) -> "LowRank":
        """See `StandIn`: the gate is that of the rows."""
        return replace(self, base=ops.of_rows(self.base, rows), gate=None if self.gate is None else rows(self.gate))

    def primitive(self, primitive: ops.Primitive, operands: tuple, params: Mapping[str, object]) -> object:
        """Products with x; NotImplemented for what is no product."""
        if primitive.name == "einsum":
            return self._einsum(operands, str(params["equation"]))
        if primitive.name == "grouped_matmul" and operands[1] is self:
            return self._grouped(operands[0], operands[2])
        if primitive.name == "embedding" and operands[1] is self:
            return self._embedding(operands[0], cut=bool(params["start"]))
        return NotImplemented

    def function(self, name: str, args: tuple, kwargs: Mapping[str, object]) -> object:
        """Products by functions of torch, and views of the weight; NotImplemented for all others."""
        if name == "linear" and len(args) + len(kwargs) <= 3 and args[1:2] == (self,):
            bias: Any = args[2] if len(args) > 2 else kwargs.get("bias")
            y = self._matmul(args[0], self._permuted((1, 0)))
            return y if bias is None else y + bias
        if name == "matmul" and args[1:2] == (self,) and self.ndim == 2:
            return self._matmul(args[0], self)
        if name == "einsum" and len(args) == 3 and isinstance(args[0], str) and "." not in args[0]:
            return ops.einsum(*args)
        view = _VIEWS.get(name)
        if view is None or not args or args[0] is not self or isinstance(self.base, StandIn):
            return NotImplemented
        return view(self, *args[1:], **kwargs)

    @staticmethod
    def _matmul(x: Tensor, weight: Any) -> Tensor:
        rows = string.ascii_lowercase[: x.ndim - 1]
        return ops.einsum(f"{rows}y,yz->{rows}z", x, weight)

    def _einsum(self, operands: tuple, equation: str) -> Any:
        inputs, _, output = equation.partition("->")
        mine = 1 if operands[1] is self else 0
        x, (of_x, of_weight) = operands[1 - mine], inputs.split(",")[:: 1 if mine else -1]
        if isinstance(x, StandIn):
            x = x.tensor()
        renamed = dict(zip(self.letters, of_weight, strict=True)) | {RANK: _unused(equation)}
        a, b = ("".join(renamed[c] for c in factor.letters) for factor in (self.a, self.b))
        gain = "" if self.gain is None else "".join(renamed[c] for c in self.gain.letters)
        first = _first(of_x, output, a, b)
        if first is None or not set(gain) <= set(output) or not self._has_tokens(x):
            return NotImplemented
        (one, one_letters), (two, two_letters) = ((self.a, a), (self.b, b))[:: 1 if first == "a" else -1]
        dropped = self.drop(x) if self.drop is not None and first == "a" else x
        kept = "".join(c for c in dict.fromkeys(of_x + one_letters) if c in two_letters or c in output)
        pair = f"{of_x},{of_weight}->{output}"
        # in this order what is added, forward and backward, finds a sum of the base that is pending, and joins it
        read = ops.einsum(f"{of_x},{one_letters}->{kept}", dropped, one.value.to(x.dtype))
        middle = self._scaled(read, x, f"{of_x[:2]}{renamed[RANK]}", kept)
        plain = ops.einsum(pair, x, self.base)
        if self.gain is None or dropped is x:
            y = plain + ops.einsum(f"{kept},{two_letters}->{output}", middle, two.value.to(x.dtype))
            return y if self.gain is None else y * self._spread(Factor(self.gain.value, gain), output).to(y.dtype)
        factor = self._spread(Factor(self.gain.value, gain), output).to(x.dtype)
        second = two.value * self._spread(Factor(self.gain.value, gain), two_letters)
        y = plain + ops.einsum(pair, dropped, self.base) * (factor - 1)
        return y + ops.einsum(f"{kept},{two_letters}->{output}", middle, second.to(x.dtype))

    def _has_tokens(self, x: Tensor) -> bool:
        """Whether the gate, if there is one, is about the first dims of x."""
        return self.gate is None or self.gate.shape[:-1] == x.shape[: self.gate.ndim - 1]

    def _scaled(self, read: Tensor, x: Tensor, of_gate: str, letters: str) -> Tensor:
        """What A gives for x, whose dims are `letters`, times the scale or the gate, whose dims are `of_gate`."""
        if self.gate is None:
            return read * self.scale
        return read * self._spread(Factor(self.gate.to(x.dtype), of_gate), letters)

    def _grouped(self, x: Tensor, offsets: Tensor) -> Any:
        expert, given, result = tuple(self.letters)
        both = expert in self.a.letters and expert in self.b.letters
        if not both or self.gain is not None or self.drop is not None or given in set(self.a.letters) & set(self.b.letters):
            return NotImplemented
        one, two = (self.a, self.b) if given in self.a.letters else (self.b, self.a)
        if result not in two.letters or not self._has_tokens(x):
            return NotImplemented
        read = ops.grouped_matmul(x, one.ordered(expert + given + RANK).to(x.dtype), offsets)
        middle = self._scaled(read, x, f"a{RANK}", f"a{RANK}")
        plain = ops.grouped_matmul(x, self.base, offsets)
        return plain + ops.grouped_matmul(middle, two.ordered(expert + RANK + result).to(x.dtype), offsets)

    def _embedding(self, ids: Tensor, *, cut: bool) -> Any:
        row, column = tuple(self.letters)
        one, two = (self.a, self.b) if row in self.a.letters else (self.b, self.a)
        if cut or self.gain is not None or column not in two.letters or row in two.letters or column in one.letters:
            return NotImplemented
        if not self._has_tokens(ids):
            return NotImplemented
        read = ops.embedding(ids, one.ordered(row + RANK))
        middle = self._scaled(read, read, f"ab{RANK}", f"ab{RANK}")
        plain = ops.embedding(ids, self.base)
        return plain + self._matmul(middle, two.ordered(RANK + column)).to(plain.dtype)

    @staticmethod
    def _spread(factor: Factor, letters: str) -> Tensor:
        """`factor` with dims of size 1 for the letters that it lacks."""
        ordered = factor.ordered("".join(c for c in letters if c in factor.letters))
        return ordered[tuple(slice(None) if c in factor.letters else None for c in letters)]

    @property
    def _factors(self) -> dict[str, Factor]:
        factors = {"a": self.a, "b": self.b}
        return factors if self.gain is None else {**factors, "gain": self.gain}

    def _permuted(self, order: Sequence[int]) -> "LowRank":
        order = [dim % self.ndim for dim in order]
        return replace(self, base=self.base.permute(order), letters="".join(self.letters[dim] for dim in order))

    def _transposed(self, first: int, second: int) -> "LowRank":
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self._permuted(order)

    def _narrowed(self, dim: int, start: int, length: int) -> "LowRank":
        return self._of_dim(dim, lambda x, at: x.narrow(at, start, length), self.letters)

    def _of_dim(self, dim: int, view: Callable[[Tensor, int], Tensor], letters: str) -> "LowRank":
        """`view(tensor, dim)` of the base, and of each factor that has the dim."""
        letter = self.letters[dim]
        gone = letter not in letters
        changed: dict[str, Any] = {
            name: Factor(
                view(factor.value, factor.letters.index(letter)), factor.letters.replace(letter, "") if gone else factor.letters
            )
            for name, factor in self._factors.items()
            if letter in factor.letters
        }
        return replace(self, base=view(self.base, dim % self.ndim), letters=letters, **changed)

    def _selected(self, dim: int, index: int) -> "LowRank":
        return self._of_dim(dim, lambda x, at: x.select(at, index), self.letters.replace(self.letters[dim], ""))

    def _item(self, index: Any) -> Any:
        return self._selected(0, index) if isinstance(index, int) else NotImplemented

    def _split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["LowRank", ...]:
        total = self.shape[dim]
        lengths = [min(sizes, total - at) for at in range(0, total, sizes)] if isinstance(sizes, int) else list(sizes)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return tuple(self._narrowed(dim, start, length) for start, length in zip(starts, lengths, strict=True))

    def _chunked(self, chunks: int, dim: int = 0) -> tuple["LowRank", ...]:
        return self._split(-(-self.shape[dim] // chunks), dim)

    def _unbound(self, dim: int = 0) -> tuple["LowRank", ...]:
        return tuple(self._selected(dim, index) for index in range(self.shape[dim]))

    def _reshaped(self, *shape: Any) -> Any:
        """The same weight with merged or divided dims, if each merged dim is in the same factors."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        groups = regroup(self.shape, list(sizes))
        if groups is None:
            return NotImplemented
        letters, changed = "", dict[str, Any](self._factors)
        unused = (c for c in string.ascii_lowercase if c not in self.letters)
        for group in groups:
            old = self.letters[group.old.start : group.old.stop]
            new = old if group.unchanged else "".join(next(unused) for _ in group.sizes)
            letters += new
            for name, factor in changed.items():
                made = factor if group.unchanged else _regrouped(factor, old, new, group)
                if made is None:
                    return NotImplemented
                changed[name] = made
        return replace(
            self, base=self.base.reshape([size for group in groups for size in group.sizes]), letters=letters, **changed
        )

    def _unflattened(self, dim: int, sizes: Sequence[int]) -> Any:
        dim %= self.ndim
        return self._reshaped([*self.shape[:dim], *sizes, *self.shape[dim + 1 :]])

    def _flattened(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        start, end = start_dim % self.ndim, end_dim % self.ndim
        return self._reshaped([*self.shape[:start], -1, *self.shape[end + 1 :]])

    def _cast(self, dtype: Any) -> Any:
        if not isinstance(dtype, torch.dtype):
            return NotImplemented
        if dtype == self.dtype or self.gate is None:
            return self if dtype == self.dtype else NotImplemented
        a, b = (Factor(factor.value.to(dtype), factor.letters) for factor in (self.a, self.b))
        return replace(self, base=self.base.to(dtype), a=a, b=b)


_VIEWS: dict[str, Callable[..., Any]] = {
    "transpose": LowRank._transposed,
    "permute": lambda x, *order: x._permuted(order[0] if len(order) == 1 and not isinstance(order[0], int) else order),
    "t": lambda x: x._permuted(range(x.ndim)[::-1]),
    "narrow": LowRank._narrowed,
    "select": LowRank._selected,
    "getitem": LowRank._item,
    "split": LowRank._split,
    "chunk": LowRank._chunked,
    "unbind": LowRank._unbound,
    "reshape": LowRank._reshaped,
    "view": LowRank._reshaped,
    "unflatten": LowRank._unflattened,
    "flatten": LowRank._flattened,
    "contiguous": lambda x: x,
    "to": LowRank._cast,
}
"""Views by their names, which give another LowRank."""


def _first(of_x: str, output: str, a: str, b: str) -> str | None:
    """The factor with which x is multiplied first: the one with the dims that the product sums; None if it is not one of them."""
    sums_a, sums_b = ({c for c in mine if c not in other and c in of_x and c not in output} for mine, other in ((a, b), (b, a)))
    kept = {c for c in a + b if c.islower() or c.isupper()} - set(of_x) - set(output)
    return None if bool(sums_a) == bool(sums_b) or len(kept) > 1 else "a" if sums_a else "b"


def _unused(equation: str) -> str:
    return next(c for c in string.ascii_letters if c not in equation)


def _regrouped(factor: Factor, old: str, new: str, group: Regroup) -> Factor | None:
    """`factor` with the dims `old` merged or divided to `new`; None if it has only some of them."""
    inside = [c for c in factor.letters if c in old]
    if not inside:
        return factor
    ones = {c for c, size in zip(old, group.old_sizes, strict=True) if size == 1}
    if set(old) - set(inside) - ones:
        return None
    others = [c for c in factor.letters if c not in old]
    value = factor.ordered("".join(others) + "".join(c for c in old if c in inside))
    return Factor(value.reshape([*value.shape[: len(others)], *group.sizes]), "".join(others) + new)
