"""Subject: one thing that is spread over ranks, in our programs and in those of torch; all else of the benchmark is shared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from mpar.mesh import Mesh
from mpar.models import Model
from mpar.strategy import Strategy

__all__ = ["OURS", "Config", "Plan", "Sizes", "Step", "Subject"]

OURS = {"mpar": None, "mpar_gloo": "backend"}
"""Names of our programs, and the transport they are bound with: shared memory where there is one, or gloo's collectives."""

Sizes = Mapping[str, int]
"""What the command line says besides the config, by name."""
Config = Any
"""A config of the peers, whose class is in their folder, or one that has its fields."""
Step = Callable[[], Tensor]
"""Takes the next step and gives its loss."""


@dataclass(frozen=True)
class Plan:
    """How our program of a method is compiled."""

    mesh: Mesh
    strategy: Strategy
    num_slices: int = 1


@dataclass(frozen=True)
class Subject:
    """One thing that is spread, in several ways.

    sizes: options of the command line and their defaults. variants: what runs if nothing else is asked for, as `program:method`.
    pairs: for ours the peers that they are compared with. config: the peers' config at given sizes; label: how lines of results
    call it. model, params: ours, and the peers' first weights by our paths. plan: of a method on a number of ranks. torch_step:
    the step of a peer (by the name of its variant) on this rank.
    """

    name: str
    help: str
    sizes: Sizes
    variants: Sequence[str]
    pairs: Mapping[str, Sequence[str]]
    config: Callable[[Config, Sizes], Config]
    label: Callable[[str, Sizes], str]
    model: Callable[[ModuleType, Config], Model]
    params: Callable[[ModuleType, Config], Mapping[str, Tensor]]
    plan: Callable[[str, int], Plan]
    torch_step: Callable[[ModuleType, Config, str, int], Step]
