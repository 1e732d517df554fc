"""Inference by compiled programs. Importing this loads the compiler, which importing `mpar.infer` does not."""

import torch

from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._lead import Leader, follow
from mpar.infer._program_runner import ProgramRunner
from mpar.infer._row_runner import RowRunner
from mpar.infer._scheduler import Sizes
from mpar.mesh import Mesh
from mpar.models import CacheSizes, Trainable, with_cache
from mpar.precision import Precision
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = ["Leader", "ProgramRunner", "compile_decode", "follow", "make_runner", "num_groups"]


def make_runner(
    model: Trainable,
    params: Tree,
    sizes: Sizes,
    mesh: Mesh | None = None,
    strategy: Strategy | str = "tp",
    *,
    precision: Precision | str | None = None,
    device: torch.device | str = "cpu",
) -> ProgramRunner | RowRunner:
    """The runner for a model: by compiled programs, or in a single process row by row, in the dtype of the parameters, if the
    model cannot keep a cache of pages. The model may have adapters or quantised weights.

    With a mesh of several ranks, `params` are as `ProgramRunner` says. Raises ConfigError if the model cannot run on it.
    """
    try:
        with_cache(model, CacheSizes(sizes.rows, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages))
    except ConfigError as error:
        if mesh is not None and mesh.size > 1:
            raise ConfigError(f"cannot run on {mesh}: {error}\nUse a single rank.") from None
        return RowRunner(model, params, sizes)
    return ProgramRunner(model, params, sizes, mesh, strategy, precision=precision, device=device)


def num_groups(mesh: Mesh, strategy: Strategy | str) -> int:
    """Into how many groups the rows of a runner are divided: as many as there are parts of a batch."""
    table = preset(strategy) if isinstance(strategy, str) else strategy
    return mesh.axis_size(tuple(table.compute["batch"]))
