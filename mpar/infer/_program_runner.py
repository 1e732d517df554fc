"""Program runner: carries out the steps of an engine by compiled programs, on one rank or on all ranks of a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mpar import tree
from mpar.chain import Axes, is_axes
from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._scheduler import Sizes
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.models import CacheSizes, DecoderParams, Model
from mpar.precision import Precision
from mpar.program import Program, State, batch_rows
from mpar.strategy import Strategy, preset

__all__ = ["ProgramRunner"]

Run = Callable[[State, Mapping[str, Tensor]], tuple[State, dict[str, Tensor]]]
"""`run(state, batch)` gives the new state and the results of a step."""
_GROWTH = 4
"""By how much each number of tokens for which there is a program exceeds the one before: less padding, but more to compile."""


class ProgramRunner:
    """A runner of a model that has a cache of pages. Its programs for several numbers of tokens share one state; each is compiled
    when a step first needs it, or by `prepare`.

    mesh: with several ranks, every process of torch.distributed has a runner, and all are given the same steps. The leaves of
          `params` are global tensors, or DTensors placed as the program stores them.
    Raises ConfigError for a model without such a cache, and for rows that are longer than it has learned positions.
    """

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
        self.model, self.sizes, self.vocab_size, self.device = model, sizes, model.vocab_size, torch.device(device)
        self.shares_pages = not model.sequential  # the state of a scan is in no page
        mesh, strategy = mesh or Mesh(tp=1), preset(strategy) if isinstance(strategy, str) else strategy
        self.counts = _counts(sizes.tokens, _unit(strategy, mesh))
        self._compile = functools.partial(
            compile_decode, model, mesh, strategy, precision=precision, kernels=kernels_for("auto", self.device)
        )
        self.programs: dict[int, Program] = {}
        self._runs: dict[int, Run] = {}
        self._prepare(self.counts[0])
        self.state = self._first_state(self.programs[self.counts[0]], dataclasses.replace(params, mtp=None))

    def prepare(self) -> None:
        """Compile all programs now, so that no step has to wait for one."""
        for count in self.counts:
            self._prepare(count)

    def _prepare(self, count: int) -> None:
        """Compile the program for so many tokens, if that was not done yet."""
        if count not in self.programs:
            sizes = self.sizes
            self.programs[count] = self._compile(CacheSizes(count, sizes.rows, sizes.row_pages, sizes.page_size, sizes.pages))
            self._runs[count] = self._bound(self.programs[count])

    def _bound(self, program: Program) -> Run:
        """The function that runs a step, on the batch of all ranks."""
        run = program.bind(device=self.device)
        if program.mesh.size == 1:
            return run
        rank = torch.distributed.get_rank()
        return lambda state, batch: run(state, batch_rows(program, batch, rank))

    def _first_state(self, program: Program, params: DecoderParams[Tensor]) -> State:
        rank = torch.distributed.get_rank() if program.mesh.size > 1 else 0
        leaves = {path: leaf.to(self.device) for path, leaf in program.init_state(params, rank).leaves.items()}
        axes = {f"params.{path}": names for path, names in tree.leaves_with_path(self.model.param_axes, is_leaf=is_axes)}
        return State({path: _laid_out(leaf, axes.get(path, ())) for path, leaf in leaves.items()})

    def step(self, tokens_T: Tensor, order_T: Tensor, rows_T: Tensor, pages_RP: Tensor, last_R: Tensor) -> Tensor:
        """See `Runner`."""
        given = tokens_T.shape[0]
        count = next(n for n in self.counts if n >= given)
        self._prepare(count)
        padded = {"tokens": (tokens_T, 0), "positions": (order_T, 0), "rows": (rows_T, -1)}
        batch = {key: torch.nn.functional.pad(x, (0, count - given), value=fill) for key, (x, fill) in padded.items()}
        batch |= {"pages": pages_RP.flatten(), "last": last_R}
        on_device = {key: x[None].to(self.device) for key, x in batch.items()}
        self.state, results = self._runs[count](self.state, on_device)
        return results["logits"][0]

    def logits(self, tokens_S: Tensor) -> Tensor:
        """See `Runner`. Raises ConfigError on several ranks, none of which has all parameters."""
        if self.programs[self.counts[0]].mesh.size > 1:
            raise ConfigError("cannot compute the logits of a whole text on several ranks: evaluate on one.")
        model = self.model.without_multi_token()
        paths, structure = tree.paths(model.abstract_params), tree.flatten(model.abstract_params)[1]
        params = tree.unflatten(structure, [self.state.leaves[f"params.{path}"] for path in paths])
        with torch.no_grad():
            return model.apply(params, tokens_S[None].to(self.device))[0].cpu()


def _laid_out(leaf: Tensor, axes: Axes) -> Tensor:
    """A matrix in bfloat16 on a CPU with the features that products sum over next to each other in memory, because
    products with a few rows are faster so. In float32 they are not."""
    if leaf.device.type != "cpu" or leaf.dtype != torch.bfloat16 or "vocab" in axes[:1] or "expert" in axes:
        return leaf
    if len(axes) > 1 and axes[0] == "embed":
        return leaf.movedim(0, -1).contiguous().movedim(-1, 0)
    if len(axes) > 1 and axes[-1] == "embed":
        return leaf.movedim(-1, 0).contiguous().movedim(0, -1)
    return leaf


def _counts(largest: int, unit: int) -> list[int]:
    """The numbers of tokens for which there are programs: multiples of `unit`, and the largest one."""
    counts = [unit]
    while counts[-1] < largest:
        counts.append(min(_GROWTH * counts[-1], largest))
    return counts


def _unit(strategy: Strategy, mesh: Mesh) -> int:
    """The number of tokens of a step is a multiple of this: ranks divide tokens among them, or what their experts compute."""
    axes = {axis for name in ("seq", "residual_seq") for axis in strategy.compute.get(name, ())}
    return math.lcm(mesh.axis_size(tuple(axes)), strategy.expert_parallel)
