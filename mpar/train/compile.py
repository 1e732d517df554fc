"""Compiles the programs of a run. Importing this loads the compiler, which neither ranks nor runs with a kept program need."""

import csv
from dataclasses import replace

from mpar.compiler import Schedule, policy
from mpar.errors import ConfigError
from mpar.files import MAX_TABLE_BYTES, Unreadable, read_text
from mpar.models import Trainable, with_frozen
from mpar.program import Program
from mpar.program.compile import compile_eval, compile_forward, compile_step
from mpar.schedules import Action, from_table, layout_letters
from mpar.strategy import Strategy
from mpar.tasks import AnswerLogps, Measured, Reward, TaskChain
from mpar.train._config import TrainConfig
from mpar.train._orders import orders
from mpar.train._plug_ins import plug_in_of
from mpar.train._setup import RunSetup, batch_shapes, chain_of, run_optimizer
from mpar.train._sizes import num_microbatches

__all__ = [
    "compile_evaluation",
    "compile_measure",
    "compile_program",
    "compile_reference",
    "compile_scorer",
    "make_schedule",
]


def compile_program(setup: RunSetup) -> Program:
    """The program that the configuration describes; needs no data and no weights. Raises MparError."""
    config, recompute = setup.config, setup.config.recompute
    _check_scans(setup.model, setup.strategy, config.mesh.cp)
    return compile_step(
        setup.chain,
        run_optimizer(config, config.steps),
        setup.mesh,
        setup.strategy,
        batch_shapes(config, setup.chain, setup.model),
        schedule=make_schedule(config),
        num_microbatches=num_microbatches(config),
        num_slices=config.schedule.num_slices,
        bucket_bytes=config.schedule.bucket_bytes,
        prefetch_bytes=config.schedule.prefetch_bytes,
        precision=config.precision.name,
        recompute=policy(recompute.kind, recompute.names, recompute.budget, offload=recompute.offload),
        hardware=setup.hardware,
        kernels=setup.kernels,
    )


def _check_scans(model: Trainable, strategy: Strategy, num_ranks: int) -> None:
    """Raise ConfigError if layers that scan a sequence would have it out of order or in parts on different ranks."""
    if num_ranks == 1 or not model.sequential:
        return
    wrong = ["sequence=zigzag"] * (strategy.sequence == "zigzag")
    wrong += [f"context_parallel={strategy.context_parallel}"] * ("ring" in (strategy.context_parallel or ""))
    if wrong:
        raise ConfigError(
            f"cannot use {' and '.join(f'strategy.{word}' for word in wrong)} with this {model.name} model: its layers scan a "
            "sequence from the first token to the last, and need it whole and in order.\n"
            "Use context_parallel=all_to_all, which gives every rank some heads, or all_gather, and sequence=auto or contiguous."
        )


def compile_evaluation(setup: RunSetup, program: Program) -> Program:
    """A program that does only the forwards of `program`, in the same order and on the same stages.

    `program` was compiled for the same `setup`. The layer of multi-token prediction is left out: an evaluation reports only the
    loss of the next token.
    """
    config, model = setup.config, setup.model.without_multi_token()
    chain = setup.chain if model is setup.model else chain_of(config, with_frozen(model, setup.chain.frozen))
    names = {segment.name for segment in chain.segments}
    stage_of = {name: stage for name, stage in program.facts.stage_of.items() if name in names}
    strategy, chosen = setup.strategy, program.facts.context_parallel
    if chosen is not None:  # predicted times of forwards alone could choose a way that stores parameters elsewhere
        strategy = replace(strategy, context_parallel=chosen)
    forwards = [[action for action in position_actions if action.kind == "F"] for position_actions in program.schedule]
    return compile_eval(
        chain,
        setup.mesh,
        strategy,
        batch_shapes(config, chain, model, training=False),
        schedule=Schedule("forwards", layout=layout_letters(stage_of), table=forwards),
        num_microbatches=num_microbatches(config),
        num_slices=config.schedule.num_slices,
        bucket_bytes=config.schedule.bucket_bytes,
        prefetch_bytes=config.schedule.prefetch_bytes,
        precision=config.precision.name,
        hardware=setup.hardware,
        kernels=setup.kernels,
    )


def compile_reference(setup: RunSetup) -> Program:
    """A program of forwards that gives the log-probability of every answer in a microbatch of the run."""
    config, chain = setup.config, setup.chain
    assert isinstance(chain, TaskChain)
    shapes = batch_shapes(config, chain, setup.model)
    count = num_microbatches(config)
    small = {key: ((rows // count, length), dtype) for key, ((rows, length), dtype) in shapes.items() if key != "reference_logps"}
    return compile_forward(
        AnswerLogps(chain.base, chain.task),
        setup.mesh,
        setup.strategy,
        small,
        bucket_bytes=config.schedule.bucket_bytes,
        prefetch_bytes=config.schedule.prefetch_bytes,
        precision=config.precision.name,
        hardware=setup.hardware,
        kernels=setup.kernels,
    )


def compile_measure(setup: RunSetup, program: Program) -> Program:
    """A program of forwards that gives what the task measures of a microbatch of answers. It reads the parameters of `program`,
    which was compiled for the same `setup`, where these are."""
    chain = setup.chain
    assert isinstance(chain, TaskChain)
    forwards = [[action for action in actions if action.kind == "F" and action.microbatch == 0] for actions in program.schedule]
    schedule = Schedule("forwards", layout=layout_letters(program.facts.stage_of), table=forwards)
    strategy, chosen = setup.strategy, program.facts.context_parallel
    if chosen is not None:  # predicted times of forwards alone could choose a way that stores parameters elsewhere
        strategy = replace(strategy, context_parallel=chosen)
    measured = Measured(chain.base, chain.task, chain.reference, chain.shared)
    made = _compile_measured(replace(setup, strategy=strategy), measured, schedule)
    places = {leaf.path: (leaf.spec, leaf.dtype) for leaf in program.state_in}
    assert all(places[leaf.path] == (leaf.spec, leaf.dtype) for leaf in made.state_in)
    return made


def compile_scorer(setup: RunSetup, model: Trainable) -> Program:
    """A program of forwards that gives the scores of a reward model, at all positions of a microbatch of the run."""
    return _compile_measured(setup, Measured(model, Reward()), None)


def _compile_measured(setup: RunSetup, chain: Measured, schedule: Schedule | None) -> Program:
    config = setup.config
    shapes = batch_shapes(config, setup.chain, chain.base, training=False)
    count = num_microbatches(config)
    small = {key: ((rows // count, length), dtype) for key, ((rows, length), dtype) in shapes.items() if key in chain.batch_axes}
    return compile_forward(
        chain,
        setup.mesh,
        setup.strategy,
        small,
        schedule=schedule,
        bucket_bytes=config.schedule.bucket_bytes,
        prefetch_bytes=config.schedule.prefetch_bytes,
        precision=config.precision.name,
        hardware=setup.hardware,
        kernels=setup.kernels,
    )


def make_schedule(config: TrainConfig) -> Schedule:
    """The schedule that the configuration describes. Raises ConfigError if its table or plug-in cannot be read."""
    group, plug_in = config.schedule, plug_in_of(config.schedule)
    table = None
    if group.table is not None:
        try:
            read = from_table(read_text(group.table, MAX_TABLE_BYTES), drop=True)
            table = [[item for item in row if isinstance(item, Action)] for row in read]  # the compiler places messages itself
        except Unreadable as error:
            raise ConfigError(f"cannot read schedule.table={group.table}: {error}") from None
        except ConfigError as error:
            raise type(error)(f"schedule.table={group.table}: {error}") from None
        except csv.Error as error:
            raise ConfigError(f"cannot read schedule.table={group.table}: it is no comma-separated text ({error})") from None
    elif plug_in is not None:
        table = orders(plug_in, config.mesh.pp, group.num_chunks, num_microbatches(config))
    elif group.name == "forward_only":
        raise ConfigError(
            "cannot train with schedule.name=forward_only: it has no backwards. An evaluation uses the schedule of the training."
        )
    options = group.options if plug_in is None else {}
    return Schedule(group.name, group.num_chunks, group.layout, options, table, group.paired)
