"""Subject: what a benchmark spreads over ranks, in our programs and in torch's. Subjects share the rest of the benchmark."""

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
"""Names of our programs, and the transport that they are bound with. None: the program's choice; "backend": gloo."""

Sizes = Mapping[str, int]
"""Options of the command line besides the config, by name."""
Config = Any
"""A config of the peers, whose class is defined in their folder, or an object with the same fields."""
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
    """What is spread over ranks, and the methods that do so.

    sizes: options of the command line, and their defaults.
    variants: those that run by default, each as `program:method`.
    pairs: for variants of ours, the peers that they are compared with.
    config: gives the peers' config at these sizes.
    label: gives its name in lines of results.
    model: gives our model.
    params: gives the peers' initial weights, by our paths.
    plan: gives the plan of a method on a number of ranks.
    torch_step: gives the step of a peer's variant on this rank.
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
