"""Program runner: carries out the steps of an engine by compiled programs, on one rank or on all ranks of a mesh."""

import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from mpar import tree
from mpar.errors import ConfigError
from mpar.infer._check_params import check_params
from mpar.infer._packed_params import Packing, packings
from mpar.infer._pages import SPARE_PAGE
from mpar.infer._scheduler import Sizes
from mpar.infer._scorer import Scorer
from mpar.infer._scores import Scores
from mpar.infer._screened_head import screened_head
from mpar.infer._tables import Tables
from mpar.kernels import kernels_for
from mpar.mesh import Mesh
from mpar.models import SCREEN, CacheSizes, ScoredDecoder, Trainable
from mpar.precision import Precision
from mpar.precision import precision as make_precision
from mpar.program import Program, RankRun, Replay, State, batch_rows, cpp_calls
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = ["Compiling", "Kept", "ProgramRunner", "anew"]

_PARAMS = "params."
Run = Callable[[State, Mapping[str, Tensor]], tuple[State, dict[str, Tensor]]]
"""`run(state, batch)` gives the new state and the results of a step."""
Compiling = Callable[[str], AbstractContextManager[object]]
"""`with compiling(what):` stands around the work of compiling a program; `what` says which, as in "steps of up to 16 tokens"."""
Kept = Callable[[str, Callable[[], Program]], Program]
"""`kept(role, make)` gives the program for `role`: one that was kept from another time, or that of `make`. The role tells
programs of one model apart."""
_FIRST, _GROWTH = (1, 4, 8, 16), 2
"""The numbers of tokens for which there are programs: these, and then each exceeds the one before by a factor. More of them would
mean less padding, but more to compile; most steps of an engine have one token of each of a few rows."""
_RECORDED = 32
"""Steps of at most so many tokens are recorded. A record keeps all that its step allocates."""


_FILL = {"tokens": 0, "positions": 0, "rows": -1}
"""What the entries of a batch have for padding."""


def anew(role: str, make: Callable[[], Program]) -> Program:
    """The program of `make`: nothing is kept."""
    return make()


class ProgramRunner:
    """A runner of a model that has a cache of pages. Its programs for several numbers of tokens share one state; each is compiled
    when a step first needs it, or by `prepare`.

    mesh: with several ranks, every process of torch.distributed has a runner, and all are given the same steps. The leaves of
          `params` are global tensors, or DTensors placed as the program stores them. Ranks that share data have groups of rows.
    execution: how programs run, as `Program.bind` says. "cuda_graph" records each at its second step, on one GPU.
    compiling: is told when a program is compiled, for which steps have to wait. kept: may have programs of other times.
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
        execution: str = "eager",
        compiling: Compiling = nullcontext,
        kept: Kept = anew,
    ) -> None:
        self.model, self.sizes, self.device = model, sizes, torch.device(device)
        self._execution, self._compiling = execution, compiling
        mesh, table = mesh or Mesh(tp=1), preset(strategy) if isinstance(strategy, str) else strategy
        kernels = kernels_for("auto", self.device)
        self._screen = screened_head(model, mesh, table, make_precision(precision), self.device)
        screened, how = self._screen is not None, f"{mesh} {table} {precision} {kernels}"

        def compile_decode(cache: CacheSizes) -> Program:
            def make() -> Program:
                return _compiler().compile_decode(
                    model, mesh, table, cache, precision=precision, kernels=kernels, screened=screened
                )

            return kept(f"decode {cache} {screened} {how}", make)

        def compile_scores(chain: ScoredDecoder) -> Program:
            def make() -> Program:
                return _compiler().compile_scores(chain, mesh, table, precision=precision, kernels=kernels)

            return kept(f"scores {chain.length} {chain.groups} {chain.num_likeliest} {how}", make)

        self._compile = compile_decode
        self.programs: dict[int, Program] = {}
        self._runs: dict[int, Run] = {}
        self.counts = _counts(sizes.tokens, _unit(table, mesh))
        share = mesh.axis_size(tuple(table.compute["seq"]))
        _check_positions(model, sizes.length, share)
        self._scorer = Scorer(model, sizes.length, share, sizes.groups, compile_scores, self._bind_scores, self.device, compiling)
        with compiling(_steps(self.counts[0])):
            self.state = self._first_state(self._program(self.counts[0]), params)
            self._bind(self.counts[0])

    @property
    def shares_pages(self) -> bool:
        """See `Runner`; the state of a scan is in no page."""
        return not self.model.sequential

    @property
    def vocab_size(self) -> int:
        """See `Runner`."""
        return self.model.vocab_size

    @property
    def adapters(self) -> Sequence[str]:
        """See `Runner`."""
        return self.model.adapter_names

    def prepare(self) -> None:
        """Compile all programs now, so that no step has to wait for one."""
        while self.prepare_next():
            pass

    def prepare_next(self) -> bool:
        """See `Runner`: compile the smallest program that is missing."""
        missing = [count for count in self.counts if count not in self._runs]
        if missing:
            self._prepare(missing[0])
        return len(missing) > 1

    def _prepare(self, count: int) -> None:
        """Compile the program for so many tokens, if that was not done yet."""
        if count not in self._runs:
            with self._compiling(_steps(count)):
                self._program(count)
                self._bind(count)

    def _program(self, count: int) -> Program:
        """The program for so many tokens, which is compiled if that was not done yet."""
        if count not in self.programs:
            self.programs[count] = self._compile(self._cache(count))
        return self.programs[count]

    def _cache(self, count: int) -> CacheSizes:
        sizes = self.sizes
        return CacheSizes(count, sizes.group_rows, sizes.row_pages, sizes.page_size, sizes.pages, sizes.groups)

    def _bind(self, count: int) -> None:
        """Make the program for so many tokens ready to run. Inductor compiles its code when it is first called, so it makes a
        step of padding."""
        run = self._bound(self.programs[count])
        on_cpu = self._execution == "inductor" and self.device.type == "cpu"
        self._runs[count] = Replay(run, cpp_calls) if on_cpu and isinstance(run, RankRun) and count <= _RECORDED else run
        if self._execution == "inductor":
            self._run(count, self._padding(count))

    def _bind_scores(self, program: Program) -> RankRun | Replay:
        """The run of a program that scores texts; too few are scored to repay a record of CUDA graphs."""
        return program.bind(device=self.device, execution="inductor" if self._execution == "inductor" else "eager")

    def _padding(self, count: int) -> dict[str, Tensor]:
        """The batch of a step without tokens."""
        sizes = self.sizes
        columns = {key: torch.full((sizes.groups, count), fill) for key, fill in _FILL.items()}
        columns["pages"] = torch.full((sizes.groups, sizes.group_rows * sizes.row_pages), SPARE_PAGE)
        if self.adapters:
            columns["adapters"] = torch.zeros(sizes.groups, sizes.group_rows, dtype=torch.int64)
        if self._screen is not None:
            columns["greedy"] = torch.zeros(sizes.groups, sizes.group_rows, dtype=torch.bool)
        return columns | {"last": torch.full((sizes.groups, sizes.group_rows), -1)}

    def _bound(self, program: Program) -> Run:
        """The function that runs a step, on the batch of all ranks."""
        run = program.bind(device=self.device, execution=self._execution)
        if program.mesh.size == 1:
            return run
        return lambda state, batch: run(state, batch_rows(program, batch, _rank(program.mesh)))

    def _first_state(self, program: Program, params: Tree) -> State:
        self._check_memory(program)
        leaves = program.init_state(self._given(params), _rank(program.mesh)).leaves
        return State(self._packed({path: leaf.to(self.device) for path, leaf in leaves.items()}, stay=True))

    def _given(self, params: Tree) -> dict[str, Tensor]:
        """What programs read of `params`, by path, and the screen."""
        read = tree.paths(self.model.without_multi_token().abstract_params)
        given = {path: tree.get(params, path) for path in read}
        return given if self._screen is None else given | self._screen.not_made(self._cache(self.counts[0]))

    def _check_memory(self, program: Program) -> None:
        """Raise ConfigError if this machine, in which all ranks may be, has less memory than the caches take."""
        leaves = [leaf for leaf in program.state_in if not leaf.path.startswith(_PARAMS)]
        needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device.type == "cpu" and needed > there:
            rows, length = self.sizes.rows, self.sizes.length
            raise ConfigError(
                f"cannot answer {rows:,} rows of up to {length:,} tokens at a time: their cache takes {needed / 2**30:,.1f} GiB, "
                f"and this machine has {there / 2**30:,.1f} GiB of memory. Choose smaller rows= or length=."
            )

    @functools.cached_property
    def _packings(self) -> list[Packing]:
        program = self.programs[self.counts[0]]
        return packings(self.model, program, _rank(program.mesh)) if self.device.type == "cpu" else []

    def _packed(self, leaves: Mapping[str, Tensor], *, stay: bool) -> dict[str, Tensor]:
        """stay: that others do not come by `load`."""
        packed = dict(leaves)
        for packing in self._packings:
            packed |= packing(leaves, stay=stay)
        return packed

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Runner`. On several ranks these are the shards of this rank, placed as the programs store them."""
        leaves = self.state.leaves.items()
        held = {path: leaf for path, leaf in leaves if path.startswith(_PARAMS) and not path.startswith(f"{_PARAMS}{SCREEN}.")}
        given = {f"{_PARAMS}{path}": leaf.detach() for path, leaf in params.items()}
        check_params(held, {path: leaf for path, leaf in given.items() if not path.startswith(f"{_PARAMS}mtp.")})
        new = self._packed({path: leaf for path, leaf in given.items() if path in held}, stay=False)
        self.state = State(self.state.leaves | new, self.state.step)
        if self._screen is not None:
            self._screen.forget()
        for run in self._runs.values():
            if isinstance(run, Replay):  # what was recorded reads the parameters where they were
                run.forget()

    def step(self, tables: Tables) -> Tensor:
        """See `Runner`."""
        tokens_T, order_T, rows_T, pages_RP, last_R, adapters_R, _ = tables
        sizes = self.sizes
        columns = {"tokens": tokens_T, "positions": order_T, "rows": rows_T}
        places = [] if sizes.groups == 1 else _by_group(rows_T, sizes)
        given = max((len(places_N) for places_N in places), default=len(rows_T))
        count = next(n for n in self.counts if n >= given)
        self._prepare(count)
        if places:
            columns["rows"] = rows_T % sizes.group_rows
            batch = {
                key: torch.stack([_padded(column[places_N], count, _FILL[key]) for places_N in places])
                for key, column in columns.items()
            }
            last_R = _last_in_group(last_R, places)
        else:
            batch = {key: _padded(column, count, _FILL[key])[None] for key, column in columns.items()}
        batch |= {"pages": pages_RP.reshape(sizes.groups, -1), "last": last_R.view(sizes.groups, -1)}
        if self.adapters:
            batch["adapters"] = adapters_R.view(sizes.groups, -1)
        if self._screen is None:
            return self._run(count, batch)["logits"].flatten(0, 1)
        greedy_R = self._screen.greedy(tables, min(count, sizes.group_rows), self.state.leaves)
        logits_RV = self._run(count, batch | {"greedy": greedy_R.view(sizes.groups, -1)})["logits"].flatten(0, 1)
        self._screen.note(logits_RV, greedy_R)
        return logits_RV

    def _run(self, count: int, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make a step with the program for so many tokens; returns its results."""
        self.state, results = self._runs[count](self.state, {key: x.to(self.device) for key, x in batch.items()})
        return results

    def scores(self, texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0) -> list[Scores]:
        """See `Runner`."""
        return self._scorer(self.state.leaves, texts, num_likeliest, adapter)


def _check_positions(model: Trainable, length: int, share: int) -> None:
    """Raise ConfigError for rows that are longer than the model has learned positions, also where texts of that length are padded
    to a multiple of `share`, the number of ranks that divide them."""
    most = model.max_positions
    if most is not None and length > most:
        raise ConfigError(f"cannot answer with up to {length} tokens in a row: this model has learned {most} positions")
    if most is not None and -(-length // share) * share > most:
        raise ConfigError(
            f"cannot divide rows of up to {length} tokens among {share} ranks: the model has learned {most} positions, and rows "
            f"are padded to a multiple of {share}. Use length={most // share * share}."
        )


def _compiler() -> ModuleType:
    return importlib.import_module("mpar.infer._compile_decode")


def _steps(count: int) -> str:
    """Which program it is that is compiled, in words."""
    return f"steps of up to {count} token{'s' * (count > 1)}"


def _padded(column: Tensor, count: int, fill: int) -> Tensor:
    """A column with so many entries, those behind its own being `fill`."""
    return column if len(column) == count else pad(column, (0, count - len(column)), value=fill)


def _rank(mesh: Mesh) -> int:
    """The rank of this process on a mesh."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() and mesh.size > 1 else 0


def _counts(largest: int, unit: int) -> list[int]:
    """The numbers of tokens for which there are programs, up to the most that a step may have; they are multiples of `unit`."""
    counts = [unit * count for count in _FIRST if unit * count < largest]
    while counts and _GROWTH * counts[-1] < largest:
        counts.append(_GROWTH * counts[-1])
    return [*counts, -(-largest // unit) * unit]


def _unit(strategy: Strategy, mesh: Mesh) -> int:
    """The number of tokens of a step is a multiple of this: ranks divide tokens among them, or what their experts compute."""
    axes = {axis for name in ("seq", "residual_seq") for axis in strategy.compute.get(name, ())}
    return math.lcm(mesh.axis_size(tuple(axes)), strategy.expert_parallel)


def _by_group(rows_T: Tensor, sizes: Sizes) -> list[Tensor]:
    """For each group, which of the tokens are of its rows."""
    return [(rows_T // sizes.group_rows == group).nonzero()[:, 0] for group in range(sizes.groups)]


def _last_in_group(last_R: Tensor, places: Sequence[Tensor]) -> Tensor:
    """`last_R`, which counts all tokens of a step, by the places among the tokens of the row's group."""
    order_T = torch.cat([torch.arange(len(places_N)) for places_N in places])[torch.cat(list(places)).argsort()]
    return torch.where(last_R < 0, -1, order_T[last_R.clamp(min=0)])
