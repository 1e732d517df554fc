"""RoPE tables: cos and sin of position x frequency, with the scalings that stretch a model's context.

Rotary embedding: Su et al. 2021, arXiv:2104.09864, section 3.2.2. Each class here is one rotation, a `Rope` with its own
`frequencies`.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import ConfigError

__all__ = [
    "MAIN",
    "DynamicRope",
    "LinearRope",
    "Llama3Rope",
    "LongRope",
    "Rope",
    "YarnRope",
    "depends_on_length",
    "rope_tables",
    "table_keys",
]

MAIN = "main"
"""The name of a model's only rotation, or of the first of several."""


@dataclass(frozen=True)
class Rope:
    """Of the `size` // 2 pairs of features, pair i turns by `theta` ** (-2 i / size) per position."""

    theta: float
    size: int

    attention_factor = 1.0  # an attribute of the class here; only YarnRope and LongRope have a field of this name

    def frequencies(self, num_positions: int) -> list[float]:
        """Radians per position of each pair, for rows of `num_positions`."""
        return [self.theta ** (-2 * i / self.size) for i in range(self.size // 2)]


@dataclass(frozen=True)
class LinearRope(Rope):
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595, eq. 4)."""

    factor: float

    def frequencies(self, num_positions: int) -> list[float]:
        """See `Rope`."""
        return [frequency / self.factor for frequency in super().frequencies(num_positions)]


@dataclass(frozen=True)
class DynamicRope(Rope):
    """For rows longer than `max_positions`, theta grows with the row (the dynamic NTK scaling of arXiv:2309.00071, B.2)."""

    factor: float
    max_positions: int

    def frequencies(self, num_positions: int) -> list[float]:
        """See `Rope`."""
        stretch = self.factor * max(num_positions, self.max_positions) / self.max_positions - (self.factor - 1)
        return Rope(self.theta * stretch ** (self.size / (self.size - 2)), self.size).frequencies(num_positions)

    def frequencies_at(self, positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """`frequencies` for positions that are known only at run time: the largest position plus one is taken as the length."""
        length = (positions_BS.amax() + 1).clamp(min=self.max_positions).to(dtype)
        stretch = self.factor * length / self.max_positions - (self.factor - 1)
        exponents = torch.tensor([2 * i / self.size for i in range(self.size // 2)], dtype=dtype, device=positions_BS.device)
        return (self.theta * stretch ** (self.size / (self.size - 2))) ** -exponents


@dataclass(frozen=True)
class YarnRope(Rope):
    """Slow pairs are interpolated by `factor`, fast pairs are unchanged, with a ramp between (Peng et al. 2023,
    arXiv:2309.00071, sec. 3.2).

    A pair is fast if it makes at least `beta_fast` turns in `original_positions`, slow if it makes at most `beta_slow`.
    `truncate` rounds the ends of the ramp outwards to whole pairs. cos and sin are multiplied by `attention_factor` (sec. 3.4).
    """

    factor: float
    original_positions: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, num_positions: int) -> list[float]:
        """See `Rope`."""
        low, high = self._pair(self.beta_fast), self._pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        width = (high - low) or 0.001
        kept = [1 - min(max((i - low) / width, 0.0), 1.0) for i in range(self.size // 2)]
        plain = super().frequencies(num_positions)
        return [f / self.factor * (1 - keep) + f * keep for f, keep in zip(plain, kept, strict=True)]

    def _pair(self, turns: float) -> float:
        """The (fractional) pair that makes this many turns in the original context."""
        return self.size * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """The scaling of Llama 3.1: slow pairs are divided by `factor`, fast pairs are unchanged, with a smooth transition between.

    A pair is slow below `low_factor` turns in `original_positions`, fast above `high_factor`.
    """

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int

    def frequencies(self, num_positions: int) -> list[float]:
        """See `Rope`."""
        return [self._scaled(frequency) for frequency in super().frequencies(num_positions)]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_positions * frequency / (2 * math.pi)
        if turns > self.high_factor:
            return frequency
        if turns < self.low_factor:
            return frequency / self.factor
        smooth = (turns - self.low_factor) / (self.high_factor - self.low_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class LongRope(Rope):
    """The wavelength of each pair is multiplied by a factor: one of `short` in rows of up to `original_positions`, one of `long`
    in longer rows.

    Ding et al. 2024, arXiv:2402.13753, section 3. cos and sin are multiplied by `attention_factor`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float = 1.0

    def frequencies(self, num_positions: int) -> list[float]:
        """See `Rope`."""
        factors = self.long if num_positions > self.original_positions else self.short
        return [frequency / factor for frequency, factor in zip(super().frequencies(num_positions), factors, strict=True)]

    def frequencies_at(self, positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """`frequencies` for positions that are known only at run time: the largest position plus one is taken as the length."""
        lengths = (self.original_positions, self.original_positions + 1)
        short, long = (torch.tensor(self.frequencies(n), dtype=dtype, device=positions_BS.device) for n in lengths)
        last = ops.constrain(positions_BS.amax(-1), (None,)).amax(0)  # gathered: every rank needs the maximum of all rows
        return torch.where(last + 1 > self.original_positions, long, short)


@functools.cache
def _frequencies(rope: Rope, num_positions: int) -> tuple[float, ...]:
    return tuple(rope.frequencies(num_positions))


def depends_on_length(rope: Rope) -> bool:
    """Whether the angles of a position depend on the length of its row."""
    return isinstance(rope, (DynamicRope, LongRope))


def table_keys(name: str) -> tuple[str, str]:
    """The keys under which the context has cos and sin of the rotation `name`."""
    return ("cos", "sin") if name == MAIN else (f"cos_{name}", f"sin_{name}")


def rope_tables(
    rope: Rope,
    tokens_BS: Tensor,
    positions_BS: Tensor | None,
    dtype: torch.dtype,
    order_S: Tensor | None = None,
    row_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`(cos, sin)`, each (1, S, R/2) for rows that start at position 0, or (B, S, R/2) at given positions (B, S).

    Without `positions_BS`, `order_S` gives for each index along S the position in its row of the token there (None: 0, 1, ...).
    `row_length` is given if the tokens are a slice of rows of that length. `dtype`, float32 or wider, is that of the angles and
    of the tables. Raises ConfigError for a slice of rows with given positions if the rotation depends on the length of rows: a
    slice does not know the last position of its row.
    """
    num_positions = tokens_BS.shape[1]
    if positions_BS is not None and row_length is not None and depends_on_length(rope):
        raise ConfigError(
            "cannot turn slices of rows at given positions: this RoPE depends on the last position of a row, which its slices do "
            "not know.\nnum_slices=1 (schedule.num_slices in a configuration) leaves rows whole."
        )
    if positions_BS is not None and isinstance(rope, (DynamicRope, LongRope)):
        frequencies = rope.frequencies_at(positions_BS, dtype)
    else:
        frequencies = torch.tensor(list(_frequencies(rope, row_length or num_positions)), dtype=dtype, device=tokens_BS.device)
    if positions_BS is None:
        positions_BS = (torch.arange(num_positions, device=tokens_BS.device) if order_S is None else order_S)[None]
    angles = positions_BS[..., None].to(dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin
