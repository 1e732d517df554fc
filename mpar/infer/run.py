"""Runners of compiled programs, and what they need to know of a mesh. Importing this loads no compiler: a program may be kept."""

from contextlib import nullcontext
from typing import Any

import torch

from mpar.errors import ConfigError
from mpar.infer._lead import Leader, follow
from mpar.infer._program_runner import Compiling, Kept, ProgramRunner, anew
from mpar.infer._row_runner import RowRunner
from mpar.infer._scheduler import Sizes
from mpar.mesh import Mesh
from mpar.models import CacheSizes, Trainable, with_cache
from mpar.precision import Precision
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = [
    "Compiling",
    "Kept",
    "Leader",
    "ProgramRunner",
    "anew",
    "divisible_pages",
    "follow",
    "make_runner",
    "num_groups",
    "why_row_by_row",
]


def make_runner(
    model: Trainable,
    params: Tree,
    sizes: Sizes,
    mesh: Mesh | None = None,
    strategy: Strategy | str = "tp",
    *,
    precision: Precision | str | None = None,
    device: torch.device | str = "cpu",
    execution: str = "eager",
    compiling: Compiling = nullcontext,
    kept: Kept = anew,
) -> ProgramRunner | RowRunner:
    """The runner for a model: by compiled programs, or in a single process row by row, in the dtype of the parameters, if the
    model cannot keep a cache of pages. The model may have adapters or quantised weights.

    With a mesh of several ranks, `params` are as `ProgramRunner` says, and so are `execution`, `compiling` and `kept`. Raises
    ConfigError if the model cannot run on the mesh, or by this execution.
    """
    why = why_row_by_row(model, sizes)
    if why is not None:
        if mesh is not None and mesh.size > 1:
            raise ConfigError(f"cannot run on {mesh}: {why}\nUse a single rank.")
        if execution != "eager":
            raise ConfigError(f"cannot run with execution={execution!r}: {why}\nUse execution=eager.")
        return RowRunner(model, params, sizes)
    more: dict[str, Any] = {"precision": precision, "device": device, "execution": execution}
    more |= {"compiling": compiling, "kept": kept}
    return ProgramRunner(model, params, sizes, mesh, strategy, **more)


def why_row_by_row(model: Trainable, sizes: Sizes) -> str | None:
    """Why there are no programs for a model, so that it is read row by row; None if there are."""
    try:
        with_cache(model, CacheSizes(sizes.rows, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages))
    except ConfigError as error:
        return str(error)
    return None


def divisible_pages(num_pages: int, mesh: Mesh, strategy: Strategy | str) -> int:
    """The smallest number of pages, at least so many, that the ranks that share a cache divide evenly."""
    table = preset(strategy) if isinstance(strategy, str) else strategy
    ranks = mesh.axis_size(tuple(table.compute.get("pages", ())))
    return -(-num_pages // ranks) * ranks


def num_groups(mesh: Mesh, strategy: Strategy | str) -> int:
    """Into how many groups the rows of a runner are divided: as many as there are parts of a batch."""
    table = preset(strategy) if isinstance(strategy, str) else strategy
    return mesh.axis_size(tuple(table.compute["batch"]))
