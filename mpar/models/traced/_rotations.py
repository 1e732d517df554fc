"""Rotations of a traced model: functions that turn queries and keys become a primitive that they equal on random numbers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpar import ops

__all__ = ["replace_rotations"]

_NAME = "apply_rotary_pos_emb"
"""What transformers calls such a function in all of its modules."""


@dataclass(frozen=True)
class _Rotation:
    """How features are paired, and whether tables have the angle of a pair side by side or in both halves."""

    interleaved: bool
    side_by_side: bool

    def table(self, full: Tensor) -> Tensor:
        """One entry for each pair."""
        return full[..., ::2] if self.side_by_side else full[..., : full.shape[-1] // 2]

    def full(self, table: Tensor) -> Tensor:
        """One entry for each feature, as transformers makes it."""
        return table.repeat_interleave(2, -1) if self.side_by_side else torch.cat([table, table], -1)

    def apply(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of (B, N, S, H), as transformers calls it."""
        tables = (self.table(cos), self.table(sin))
        q, k = (ops.rope(x.transpose(1, 2), *tables, interleaved=self.interleaved).transpose(1, 2) for x in (q, k))
        return q, k


_CANDIDATES = (_Rotation(False, False), _Rotation(True, False), _Rotation(True, True))


def replace_rotations(module: nn.Module) -> None:
    """Let each part of `module` that calls such a function call the primitive, if both give the same."""
    found: dict[type, FunctionType | None] = {}
    for part in module.modules():
        if type(part) not in found:
            found[type(part)] = _replaced(inspect.unwrap(type(part).forward))
        forward = found[type(part)]
        if forward is not None:
            part.forward = MethodType(forward, part)


def _replaced(forward: Any) -> FunctionType | None:
    """`forward` with another function under that name; None if it calls none, or one that no primitive equals."""
    if not isinstance(forward, FunctionType) or _NAME not in {*forward.__code__.co_names} & {*forward.__globals__}:
        return None
    theirs = forward.__globals__[_NAME]
    rotation = next((each for each in _CANDIDATES if _equal(theirs, each)), None)
    if rotation is None:
        return None

    def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = cos.ndim == q.ndim - 1 == k.ndim - 1 and cos.dtype in (torch.float32, torch.float64)
        return theirs(q, k, cos, sin, *args, **kwargs) if args or kwargs or not fits else rotation.apply(q, k, cos, sin)

    copy = FunctionType(
        forward.__code__, {**forward.__globals__, _NAME: _rotate}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _equal(theirs: Callable[..., Any], rotation: _Rotation) -> bool:
    """On random numbers, where the angles of pairs are all different."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (4, 2))
    angles = torch.randn(2, 5, 8, generator=generator)
    cos, sin = rotation.full(angles.cos()), rotation.full(angles.sin())
    try:
        given = theirs(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes other arguments
        return False
    ours = rotation.apply(q, k, cos, sin)
    return len(given) == len(ours) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(given, ours, strict=True)
    )
