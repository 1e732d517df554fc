"""A function, what its arguments are, and which of its values have to be gathered whoever compiles it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from mpar import Mesh, P
from mpar.tree import Tree

__all__ = ["MESHES", "SIZES", "Arg", "Function", "bits", "distinct", "fixed", "integers", "real"]

SIZES = {
    **{"batch": 8, "seq": 16, "keys": 16, "long": 70_000, "history": 6, "beams": 4},
    **{"heads": 8, "kv_heads": 4, "head": 8, "heads_out": 8},
    **{"hidden": 32, "hidden_in": 16, "embed": 32, "embed_out": 32, "mlp": 64, "mlp_whole": 64, "out": 16, "rank": 4},
    **{"vocab": 512, "classes": 12, "experts": 8, "slots": 4, "segments": 6, "buckets": 8, "edges": 7, "grid": 9},
    **{"channels": 16, "rgb": 4, "height": 8, "width": 8, "one": 1, "two": 2},
    **{"kernel": 4, "kernel_out": 4, "kernel_h": 3, "kernel_w": 3},
}
"""How many elements each dim has."""

MESHES = {
    "dp4": (Mesh(dp=4), {"batch": "dp"}),
    "dp2_tp2": (Mesh(dp=2, tp=2), {"batch": "dp"}),
    "tp4": (Mesh(tp=4), {}),
    "dp2_sp2": (Mesh(dp=2, sp=2), {"batch": "dp", "seq": "sp"}),
}
"""Every mesh, and the mesh axes of the dims that are not in SPLIT_BY_TP."""

SPLIT_BY_TP = ("heads", "kv_heads", "hidden", "mlp", "vocab", "experts", "channels")

Gathers: TypeAlias = Mapping[str, Sequence[str]]
"""By mesh axis, the values that have to be gathered over it, or exchanged between its ranks all to all."""


@dataclass(frozen=True)
class Arg:
    """An argument: its dims, and how it is drawn.

    draw:   makes it from its shape and a generator.
    varies: whether the function is differentiated by it.
    """

    dims: tuple[str, ...]
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor]
    varies: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return tuple(SIZES[dim] for dim in self.dims)

    def spec(self, mesh: str) -> P:
        """Where it lies on the mesh of this name."""
        sharded, axes = MESHES[mesh]
        if "tp" in sharded.axes:
            axes = axes | dict.fromkeys(SPLIT_BY_TP, "tp")
        return P(*(axes.get(dim) for dim in self.dims))


def real(dims: str, *, dtype: torch.dtype = torch.float64, varies: bool = True) -> Arg:
    """Normal numbers."""
    return Arg(tuple(dims.split()), lambda shape, g: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype), varies)


def fixed(dims: str) -> Arg:
    """Normal numbers by which nobody differentiates."""
    return real(dims, varies=False)


def integers(dims: str, *, below: str) -> Arg:
    """Integers from 0 up to the size of the dim `below`."""
    return Arg(tuple(dims.split()), lambda shape, g: torch.randint(SIZES[below], shape, generator=g), varies=False)


def distinct(dims: str, *, below: str) -> Arg:
    """The same, but no integer stands twice along the last dim."""

    def draw(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        return torch.rand(*shape[:-1], SIZES[below], generator=g).argsort(-1)[..., : shape[-1]].contiguous()

    return Arg(tuple(dims.split()), draw, varies=False)


def bits(dims: str) -> Arg:
    """A mask that is True in most places, and always along the first index of the last dim."""

    def draw(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        mask = torch.rand(shape, generator=g) < 0.8
        mask[..., 0] = True
        return mask

    return Arg(tuple(dims.split()), draw, varies=False)


@dataclass(frozen=True)
class Function:
    """A pure function of tensors with its arguments.

    gathers:          what has to be gathered to compute it; over mesh axes that are not named, nothing has.
    gradient_gathers: what has to be gathered for its gradient beside that.
    """

    fn: Callable[..., Tree]
    args: tuple[Arg, ...]
    gathers: Gathers = field(default_factory=dict)
    gradient_gathers: Gathers = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.fn.__name__

    def draw(self) -> list[Tensor]:
        """Its arguments, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        return [arg.draw(arg.shape, generator) for arg in self.args]
