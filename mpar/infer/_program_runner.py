"""Program runner: carries out the steps of an engine by compiled programs, on one rank or on all ranks of a mesh."""

import dataclasses

import torch
from torch import Tensor

from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._scheduler import Sizes
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.models import CacheSizes, DecoderParams, Model
from mpar.precision import Precision
from mpar.program import Program, State
from mpar.strategy import Strategy

__all__ = ["ProgramRunner"]

_GROWTH = 4
"""By how much each number of tokens for which there is a program exceeds the one before: less padding, but more to compile."""


class ProgramRunner:
    """A runner of a model that has a cache of pages. Its programs for several numbers of tokens share one state.

    mesh: with several ranks, every process of torch.distributed has a runner, and all are given the same steps. The leaves of
          `params` are global tensors, or DTensors placed as the program stores them.
    Raises ConfigError for a model without such a cache, and for rows that are longer than it has learned positions.
    """

    shares_pages = True

    def __init__(
        self,
        model: Model,
        params: DecoderParams[Tensor],
        sizes: Sizes,
        mesh: Mesh | None = None,
        strategy: Strategy | str = "tp",
        *,
        precision: Precision | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if model.max_positions is not None and sizes.length > model.max_positions:
            raise ConfigError(
                f"cannot answer with up to {sizes.length} tokens in a row: this model has learned {model.max_positions} positions"
            )
        self.sizes, self.device = sizes, torch.device(device)
        mesh = mesh or Mesh(tp=1)
        how = {"precision": precision, "kernels": kernels_for("auto", self.device)}
        self.programs = {n: compile_decode(model, mesh, strategy, _cache_sizes(sizes, n), **how) for n in _counts(sizes)}  # type: ignore[arg-type]
        self.runs = {n: program.bind(device=device) for n, program in self.programs.items()}
        self.state = self._first_state(next(iter(self.programs.values())), dataclasses.replace(params, mtp=None))

    def _first_state(self, program: Program, params: DecoderParams[Tensor]) -> State:
        rank = torch.distributed.get_rank() if program.mesh.size > 1 else 0
        state = program.init_state(params, rank)
        return State({path: leaf.to(self.device) for path, leaf in state.leaves.items()})

    def step(self, tokens_T: Tensor, order_T: Tensor, rows_T: Tensor, pages_RP: Tensor, last_R: Tensor) -> Tensor:
        """See `Runner`."""
        given = tokens_T.shape[0]
        count = next(n for n in self.programs if n >= given)
        padded = {"tokens": (tokens_T, 0), "positions": (order_T, 0), "rows": (rows_T, -1)}
        batch = {key: torch.nn.functional.pad(x, (0, count - given), value=fill) for key, (x, fill) in padded.items()}
        batch |= {"pages": pages_RP.flatten(), "last": last_R}
        on_device = {key: x[None].to(self.device) for key, x in batch.items()}
        self.state, results = self.runs[count](self.state, on_device)
        return results["logits"][0]


def _cache_sizes(sizes: Sizes, tokens: int) -> CacheSizes:
    return CacheSizes(tokens, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages)


def _counts(sizes: Sizes) -> list[int]:
    """The numbers of tokens for which there are programs: one for each row, and more up to the most that a step may have."""
    counts = [sizes.rows]
    while counts[-1] < sizes.tokens:
        counts.append(min(_GROWTH * counts[-1], sizes.tokens))
    return counts
