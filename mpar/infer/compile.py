"""Inference by compiled programs. Importing this loads the compiler, which importing `mpar.infer` does not."""

from typing import cast

import torch

from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._engine import Runner
from mpar.infer._program_runner import ProgramRunner
from mpar.infer._row_runner import RowRunner
from mpar.infer._scheduler import Sizes
from mpar.models import CacheSizes, DecoderParams, Model, with_cache
from mpar.precision import Precision
from mpar.tree import Tree

__all__ = ["ProgramRunner", "compile_decode", "make_runner"]


def make_runner(
    model: Model,
    params: Tree,
    sizes: Sizes,
    *,
    precision: Precision | str | None = None,
    device: torch.device | str = "cpu",
) -> Runner:
    """The runner for a model on this process: by compiled programs, or row by row, in the dtype of the parameters, if the model
    cannot keep a cache of pages."""
    try:
        with_cache(model, CacheSizes(sizes.rows, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages))
    except ConfigError:
        return RowRunner(model, params, sizes)
    return ProgramRunner(model, cast(DecoderParams, params), sizes, precision=precision, device=device)
