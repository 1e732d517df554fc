"""What a rank draws answers with: the sampler over the parameters that are trained, the rewards, the prompts."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mpar import tree
from mpar.data import Tokenizer
from mpar.errors import ConfigError
from mpar.infer import Runner, Sizes, end_ids
from mpar.models import Model, Trainable, with_frozen
from mpar.program import Program
from mpar.rollouts import (
    HELD_OUT_FOLDER,
    Ask,
    Drawing,
    Drawn,
    EngineSampler,
    Exchange,
    HeldOut,
    Measure,
    RolloutBatches,
    Sampler,
    make_environment,
    make_rewards,
)
from mpar.tasks import TaskChain
from mpar.train._config import TrainConfig
from mpar.train._gather import gathered_params
from mpar.train._measure import Measuring
from mpar.train._plug_ins import environment_of
from mpar.train._reward_models import RowShape, model_rewards
from mpar.train._run_data import RunData
from mpar.train._setup import RunSetup, reward_specs, teacher_of
from mpar.train._sizes import batch_size, num_microbatches, seq_len
from mpar.train._state import PARAMS

__all__ = ["ROLLOUTS_FOLDER", "RolloutPrograms", "draw_rollouts"]

ROLLOUTS_FOLDER = "rollouts"
"""Where in the run_dir a run keeps the answers that it drew."""
_PAGE_SIZE = 16


@dataclass(frozen=True)
class RolloutPrograms:
    """The programs of forwards that a run needs besides its own: `measure` and `scorers` of `Job`."""

    measure: Program | None = None
    scorers: Mapping[str, Program] = field(default_factory=dict)


def draw_rollouts(
    setup: RunSetup,
    program: Program,
    data: RunData,
    rank: int,
    exchange: Exchange,
    device: torch.device,
    others: RolloutPrograms = RolloutPrograms(),
) -> HeldOut | None:
    """Let the batches to train on draw answers, if they are made of answers. Loads the compiler, for the sampler's programs.
    Returns what answers the prompts to evaluate on, if there are any.

    Every rank draws some of the groups by itself. Where ranks share parameters, all parameters are gathered on each of them.
    Raises ConfigError for a model that cannot answer, and for rewards that cannot be called.
    """
    batches, config = data.training, setup.config
    if not isinstance(batches, RolloutBatches):
        return None
    plan, tokenizer = batches.plan, data.tokenizer
    rows = RowShape(
        batch_size(config) // num_microbatches(config),
        seq_len(config),
        plan.max_prompt_tokens + plan.max_tokens,
        config.timeout_s,
    )
    policy = _policy(setup)
    sampler = _sampler(setup, policy, batches, tokenizer, device)
    drawing = Drawing(
        plan,
        batches.questions,
        _OfPolicy(sampler, tuple(tree.paths(policy.abstract_params)), program, rank),
        make_rewards(specs) if (specs := [spec for spec in reward_specs(config.task) if not spec.is_folder]) else (),
        lambda ids: _text(tokenizer, ids),
        config.seed,
        exchange,
        rank,
        program.mesh.size,
        model_rewards(config.task, setup.model, others.scorers, rank, device, rows),
        None if others.measure is None else _measure(Measuring.of(others.measure, rank, device, config.timeout_s)),
        _teacher(setup, batches, program, rank, tokenizer, device),
        config.task.reward_time_s,
        None if (named := environment_of(config.task)) is None else make_environment(named),
        tokenizer.encode_reply,
    )
    folder = Path(str(config.run_dir)) / ROLLOUTS_FOLDER
    batches.draw_with(drawing if plan.rewarded else replace(drawing, rewards=(), models=()), folder)
    return _held_out(config, data, drawing, folder)


def _held_out(config: TrainConfig, data: RunData, drawing: Drawing, folder: Path) -> HeldOut | None:
    """What answers the prompts to evaluate on; None if there are none. `evaluation.batches` counts batches of a prompt a row."""
    sets = {name: batches.questions for name, batches in data.evaluation.items() if isinstance(batches, RolloutBatches)}
    if not sets:
        return None
    wanted = config.evaluation
    most = None if wanted.batches is None else wanted.batches * batch_size(config)
    return HeldOut(sets, drawing, folder / HELD_OUT_FOLDER, wanted.answers, most)


@dataclass(frozen=True)
class _OfPolicy:
    """A sampler that is given the parameters of the policy alone, of those that are trained, and on several ranks all of them.

    paths: of the parameters of the policy. prefix: what their paths begin with in the program.
    """

    sampler: Sampler
    paths: tuple[str, ...]
    program: Program
    rank: int
    prefix: str = ""

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Sampler`."""
        paths = [f"{self.prefix}{path}" for path in self.paths]
        own = {path: params[path] for path in paths if path in params}  # a stage of a pipeline has some of them
        if self.program.mesh.size > 1:
            own = gathered_params(self.program, self.rank, own, paths)
        self.sampler.load({path.removeprefix(self.prefix): leaf for path, leaf in own.items()})

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """See `Sampler`."""
        return self.sampler.draw(asks)


class _Unchanging:
    """A sampler of a model that is not trained: it keeps the parameters that it is given first."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._is_loaded = sampler, False

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Sampler`. Ranks gather parameters at the first call only."""
        if not self._is_loaded:
            self._sampler.load(params)
        self._is_loaded = True

    def draw(self, asks: Sequence[Ask]) -> list[Drawn]:
        """See `Sampler`."""
        return self._sampler.draw(asks)


def _policy(setup: RunSetup) -> Trainable:
    """The model that is trained, with its adapters; it knows what is frozen, which is stored in the dtype that it computes in."""
    return setup.chain.base if isinstance(setup.chain, TaskChain) else setup.model


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens; of ids beyond the tokenizer's, which a model with a padded vocabulary may draw, nothing."""
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size], skip_special_tokens=True)


def _measure(measuring: Measuring) -> Measure:
    """The measure of a task, of parameters by their paths."""
    return lambda params, batch: measuring({f"{PARAMS}{path}": leaf for path, leaf in params.items()}, batch)


def _teacher(
    setup: RunSetup, batches: RolloutBatches, program: Program, rank: int, tokenizer: Tokenizer, device: torch.device
) -> Sampler | None:
    """The sampler of the teacher, which reads its parameters in the state of the training; None if it draws nothing."""
    if not batches.plan.teacher:
        return None
    teacher = teacher_of(setup.config)
    paths = tuple(tree.paths(teacher.abstract_params))
    teacher = with_frozen(teacher, frozenset(paths))  # all of it is stored in the dtype that it computes in
    return _Unchanging(_OfPolicy(_sampler(setup, teacher, batches, tokenizer, device), paths, program, rank, "reference."))


def _sampler(setup: RunSetup, model: Trainable, batches: RolloutBatches, tokenizer: Tokenizer, device: torch.device) -> Sampler:
    plan = batches.plan
    if not isinstance(model.plain, Model):
        raise ConfigError(f"cannot draw answers with this {model.name} model: it is a chain, and no language model of mpar.")
    rows = min(setup.config.task.rollout_rows, plan.num_answers)
    length = plan.max_prompt_tokens + plan.max_tokens
    pages = rows * -(-length // _PAGE_SIZE) + 1
    sizes = Sizes(rows=rows, tokens=max(rows, 4 * plan.max_prompt_tokens), pages=pages, page_size=_PAGE_SIZE, length=length)
    runners, precision = importlib.import_module("mpar.infer.run"), setup.config.precision.name
    by_programs = runners.why_row_by_row(model, sizes) is None
    execution = "inductor" if setup.config.execution == "inductor" and by_programs else "eager"

    def make_runner(params: Mapping[str, Tensor]) -> Runner:
        paths, structure = tree.paths(model.abstract_params), tree.flatten(model.abstract_params)[1]
        of_model = tree.unflatten(structure, [params[path] for path in paths])
        return runners.make_runner(model, of_model, sizes, precision=precision, device=device, execution=execution)

    ends = dict.fromkeys([*end_ids(model.plain), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])])
    return EngineSampler(make_runner, list(ends), plan.max_tokens)
