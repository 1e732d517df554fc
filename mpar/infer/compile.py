"""Inference by compiled programs. Importing this loads the compiler, which importing `mpar.infer` does not."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._generate import continued
from mpar.infer._lead import Leader, follow
from mpar.infer._program_runner import Compiling, ProgramRunner
from mpar.infer._row_runner import RowRunner
from mpar.infer._sampling import Sampling
from mpar.infer._scheduler import Sizes
from mpar.mesh import Mesh
from mpar.models import CacheSizes, Model, Trainable, with_cache
from mpar.precision import Precision
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = [
    "Compiling",
    "Leader",
    "ProgramRunner",
    "compile_decode",
    "divisible_pages",
    "follow",
    "generate",
    "make_runner",
    "num_groups",
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
) -> ProgramRunner | RowRunner:
    """The runner for a model: by compiled programs, or in a single process row by row, in the dtype of the parameters, if the
    model cannot keep a cache of pages. The model may have adapters or quantised weights.

    With a mesh of several ranks, `params` are as `ProgramRunner` says, and so are `execution` and `compiling`. Raises ConfigError
    if the model cannot run on the mesh, or by this execution.
    """
    try:
        with_cache(model, CacheSizes(sizes.rows, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages))
    except ConfigError as error:
        if mesh is not None and mesh.size > 1:
            raise ConfigError(f"cannot run on {mesh}: {error}\nUse a single rank.") from None
        if execution != "eager":
            raise ConfigError(f"cannot run with execution={execution!r}: {error}\nUse execution=eager.") from None
        return RowRunner(model, params, sizes)
    more: dict[str, Any] = {"precision": precision, "device": device, "execution": execution, "compiling": compiling}
    return ProgramRunner(model, params, sizes, mesh, strategy, **more)


def generate(
    model: Model,
    params: Tree,
    tokens_BS: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
) -> Tensor:
    """The prompts `tokens_BS`, all of one length, each followed by up to `max_new_tokens` new ids: (B, S + new).

    An `Engine` answers them, with the runner that `make_runner` gives; it is made anew in each call, so prompts of unlike lengths
    and many calls are for an engine of one's own. At temperature 0 the most likely token is taken; otherwise one is drawn from
    softmax(logits / temperature). Draws depend only on `seed`, the row, and the place of the new token. After a row has got one
    of `eos_ids`, it is filled with this id, and generation stops when this holds of every row.
    Raises ConfigError or DataError for arguments that cannot be used.
    """
    if max_new_tokens < 0 or not temperature >= 0:
        raise ConfigError(
            f"cannot generate with max_new_tokens={max_new_tokens}, temperature={temperature}: neither may be negative"
        )
    if max_new_tokens == 0:
        return tokens_BS
    sampling = Sampling(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return continued(
        model, lambda sizes: make_runner(model, params, sizes, device=tokens_BS.device), tokens_BS, sampling, eos_ids
    )


def divisible_pages(num_pages: int, mesh: Mesh, strategy: Strategy | str) -> int:
    """The smallest number of pages, at least so many, that the ranks that share a cache divide evenly."""
    table = preset(strategy) if isinstance(strategy, str) else strategy
    ranks = mesh.axis_size(tuple(table.compute.get("pages", ())))
    return -(-num_pages // ranks) * ranks


def num_groups(mesh: Mesh, strategy: Strategy | str) -> int:
    """Into how many groups the rows of a runner are divided: as many as there are parts of a batch."""
    table = preset(strategy) if isinstance(strategy, str) else strategy
    return mesh.axis_size(tuple(table.compute["batch"]))
