"""Program runner: carries out the steps of an engine by compiled programs, on one rank or on all ranks of a mesh."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpar import tree
from mpar.chain import Axes, is_axes
from mpar.errors import ConfigError
from mpar.infer._check_params import check_params
from mpar.infer._compile_decode import compile_decode
from mpar.infer._scheduler import Sizes
from mpar.infer._scorer import Scorer
from mpar.infer._scores import Scores
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.models import CacheSizes, ScoredDecoder, Trainable
from mpar.precision import Precision
from mpar.program import Program, State, batch_rows
from mpar.program.compile import compile_forward
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = ["ProgramRunner"]

_PARAMS = "params."
Run = Callable[[State, Mapping[str, Tensor]], tuple[State, dict[str, Tensor]]]
"""`run(state, batch)` gives the new state and the results of a step."""
_GROWTH = 4
"""By how much each number of tokens for which there is a program exceeds the one before: less padding, but more to compile."""


class ProgramRunner:
    """A runner of a model that has a cache of pages. Its programs for several numbers of tokens share one state; each is compiled
    when a step first needs it, or by `prepare`.

    mesh: with several ranks, every process of torch.distributed has a runner, and all are given the same steps. The leaves of
          `params` are global tensors, or DTensors placed as the program stores them. Ranks that share data have groups of rows.
    Raises ConfigError for a model without such a cache, and for rows that are longer than it has learned positions.
    """

    def __init__(
        self,
        model: Trainable,
        params: Tree,
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
        mesh, table = mesh or Mesh(tp=1), preset(strategy) if isinstance(strategy, str) else strategy
        kernels = kernels_for("auto", self.device)

        def compile_scores(chain: ScoredDecoder) -> Program:
            return compile_forward(chain, mesh, table, chain.batch_shape, precision=precision, kernels=kernels)

        self._compile = functools.partial(compile_decode, model, mesh, table, precision=precision, kernels=kernels)
        self._rank = torch.distributed.get_rank() if torch.distributed.is_initialized() and mesh.size > 1 else 0
        self.programs: dict[int, Program] = {}
        self._runs: dict[int, Run] = {}
        self.counts = _counts(sizes.tokens, _unit(table, mesh))
        self._prepare(self.counts[0])
        share = mesh.axis_size(tuple(table.compute["seq"]))
        self._scorer = Scorer(model, sizes.length // share * share, sizes.groups, compile_scores, self.device)
        self.state = self._first_state(self.programs[self.counts[0]], params)

    def prepare(self) -> None:
        """Compile all programs now, so that no step has to wait for one."""
        while self.prepare_next():
            pass

    def prepare_next(self) -> bool:
        """See `Runner`: compile the smallest program that is missing."""
        missing = [count for count in self.counts if count not in self.programs]
        if missing:
            self._prepare(missing[0])
        return len(missing) > 1

    def _prepare(self, count: int) -> None:
        """Compile the program for so many tokens, if that was not done yet."""
        if count not in self.programs:
            sizes = self.sizes
            self.programs[count] = self._compile(
                CacheSizes(count, sizes.group_rows, sizes.row_pages, sizes.page_size, sizes.pages, sizes.groups)
            )
            self._runs[count] = self._bound(self.programs[count])

    def _bound(self, program: Program) -> Run:
        """The function that runs a step, on the batch of all ranks."""
        run = program.bind(device=self.device)
        if program.mesh.size == 1:
            return run
        return lambda state, batch: run(state, batch_rows(program, batch, self._rank))

    def _first_state(self, program: Program, params: Tree) -> State:
        read = tree.paths(self.model.without_multi_token().abstract_params)
        given = {path: tree.get(params, path) for path in read}
        leaves = {path: leaf.to(self.device) for path, leaf in program.init_state(given, self._rank).leaves.items()}
        axes = {f"{_PARAMS}{path}": names for path, names in tree.leaves_with_path(self.model.param_axes, is_leaf=is_axes)}
        return State({path: _laid_out(leaf, axes.get(path, ())) for path, leaf in leaves.items()})

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Runner`. On several ranks these are the shards of this rank, placed as the programs store them."""
        held = {path: leaf for path, leaf in self.state.leaves.items() if path.startswith(_PARAMS)}
        given = {f"{_PARAMS}{path}": leaf.detach() for path, leaf in params.items()}
        check_params(held, {path: leaf for path, leaf in given.items() if not path.startswith(f"{_PARAMS}mtp.")})
        self.state = State({path: given.get(path, leaf) for path, leaf in self.state.leaves.items()}, self.state.step)

    def step(self, tokens_T: Tensor, order_T: Tensor, rows_T: Tensor, pages_RP: Tensor, last_R: Tensor) -> Tensor:
        """See `Runner`."""
        sizes = self.sizes
        places = [torch.arange(len(rows_T))] if sizes.groups == 1 else _by_group(rows_T, sizes)
        given = max(len(places_N) for places_N in places)
        count = next(n for n in self.counts if n >= given)
        self._prepare(count)
        columns = {"tokens": (tokens_T, 0), "positions": (order_T, 0), "rows": (rows_T % sizes.group_rows, -1)}
        batch = {
            key: torch.stack([pad(column[places_N], (0, count - len(places_N)), value=fill) for places_N in places])
            for key, (column, fill) in columns.items()
        }
        batch |= {"pages": pages_RP.reshape(sizes.groups, -1), "last": _last_in_group(last_R, places).view(sizes.groups, -1)}
        self.state, results = self._runs[count](self.state, {key: x.to(self.device) for key, x in batch.items()})
        return results["logits"].flatten(0, 1)

    def scores(self, texts: Sequence[Tensor], num_likeliest: int) -> list[Scores]:
        """See `Runner`."""
        return self._scorer(self.state.leaves, texts, num_likeliest)


def _laid_out(leaf: Tensor, axes: Axes) -> Tensor:
    """A matrix in bfloat16 on a CPU with the features that products sum over next to each other in memory, as torch's products of
    a few rows want it; in float32 they do not."""
    if leaf.device.type != "cpu" or leaf.dtype != torch.bfloat16 or "vocab" in axes[:1] or "expert" in axes:
        return leaf
    if len(axes) > 1 and axes[0] == "embed":
        return leaf.movedim(0, -1).contiguous().movedim(-1, 0)
    if len(axes) > 1 and axes[-1] == "embed":
        return leaf.movedim(-1, 0).contiguous().movedim(0, -1)
    return leaf


def _counts(largest: int, unit: int) -> list[int]:
    """The numbers of tokens for which there are programs, up to the most that a step may have; they are multiples of `unit`."""
    counts = [unit]
    while counts[-1] < largest:
        counts.append(min(_GROWTH * counts[-1], largest))
    return [-(-count // unit) * unit for count in counts]


def _unit(strategy: Strategy, mesh: Mesh) -> int:
    """The number of tokens of a step is a multiple of this: ranks divide tokens among them, or what their experts compute."""
    axes = {axis for name in ("seq", "residual_seq") for axis in strategy.compute.get(name, ())}
    return math.lcm(mesh.axis_size(tuple(axes)), strategy.expert_parallel)


def _by_group(rows_T: Tensor, sizes: Sizes) -> list[Tensor]:
    """For each group, which of the tokens are of its rows."""
    return [(rows_T // sizes.group_rows == group).nonzero()[:, 0] for group in range(sizes.groups)]


def _last_in_group(last_R: Tensor, places: Sequence[Tensor]) -> Tensor:
    """`last_R`, which counts all tokens of a step, by the places among the tokens of the row's group."""
    if len(places) == 1:
        return last_R
    order_T = torch.cat([torch.arange(len(places_N)) for places_N in places])[torch.cat(list(places)).argsort()]
    return torch.where(last_R < 0, -1, order_T[last_R.clamp(min=0)])
