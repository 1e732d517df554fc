"""What is done once before ranks start: checks, reading the data, compiling. Ranks do not import this module."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mpar import checkpoint
from mpar.data import Progress
from mpar.program import Program
from mpar.tasks import TaskChain
from mpar.train._config import PlainConfig
from mpar.train._job import Job, write_job
from mpar.train._job_folder import DATA_FOLDER, MALFORMED_FILE
from mpar.train._origin import find_origin
from mpar.train._program_cache import ProgramCache, program_key
from mpar.train._reward_models import find_reward_model, reward_folders
from mpar.train._run_data import RunData, load_data
from mpar.train._setup import RunSetup, check_device, run_optimizer

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """The job and its data, and lines for people: where its program comes from, and which checkpoints were moved aside."""

    job: Job
    data: RunData
    compiled: str
    moved: tuple[str, ...] = ()


def prepare(
    setup: RunSetup,
    resolved: PlainConfig,
    folder: Path,
    kept_programs: Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Check everything, and write the job and the tokenised data for the ranks of this node into `folder`.

    kept_programs: the folder of compiled programs that are kept from run to run; None: nothing is kept. progress: told of rows of
    the data as they are read.
    Raises an MparError of any kind: whatever is wrong with the input is found here, before any rank starts.
    """
    check_device(setup.config)
    checkpoints, on_damaged = Path(str(setup.config.run_dir)) / "checkpoints", setup.config.checkpoint.on_damaged
    moved = tuple(checkpoint.move_damaged_aside(checkpoints)) if on_damaged == "move_aside" else ()
    origin = find_origin(setup, resolved)
    if setup.config.data.batch_size is None and origin.batch_size is not None:
        group = dataclasses.replace(setup.config.data, batch_size=origin.batch_size)
        setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, data=group))
    config = setup.config
    data = load_data(setup, folder / DATA_FOLDER, Path(str(config.run_dir)) / MALFORMED_FILE, progress)
    reached = origin.reached
    if origin.resume is not None:
        reached = reached.go_on(origin.resume, config.resume, data.training.fingerprint, data.items)
        data.training.go_to(reached.data_cursor)
    program, compiled = _kept(kept_programs, setup, "training", lambda: _compiler().compile_program(setup))
    steps = config.steps - reached.optimizer_start
    program = program.with_optimizer(run_optimizer(config, steps))  # a kept program has none
    evaluation = None
    if data.evaluation and not config.task.draws:
        evaluation, _ = _kept(kept_programs, setup, "evaluation", lambda: _compiler().compile_evaluation(setup, program))
    reference = None
    if isinstance(setup.chain, TaskChain) and "reference_logps" in setup.chain.task.entries:
        reference, _ = _kept(kept_programs, setup, "reference", lambda: _compiler().compile_reference(setup))
    measure, scorers = _of_rollouts(setup, program, kept_programs)
    changes, fingerprint = origin.changes, data.fingerprint
    more = (steps, reference, measure, scorers)
    job = Job(config, resolved, program, origin.resume, evaluation, origin.init, changes, fingerprint, *more)
    write_job(folder, job)
    return Prepared(job, data, compiled, moved)


def _of_rollouts(setup: RunSetup, program: Program, kept: Path | None) -> tuple[Program | None, dict[str, Program]]:
    """The program that measures answers, if the task measures them, and those of reward models by their folders."""
    measure, scorers = None, {}
    if setup.config.task.draws and isinstance(setup.chain, TaskChain) and setup.chain.task.measured:
        measure, _ = _kept(kept, setup, "measure", lambda: _compiler().compile_measure(setup, program))
    for folder in reward_folders(setup.config.task):
        found = find_reward_model(folder, setup.model)
        role = f"scores of {json.dumps(found.model.hf_config, default=repr)}"
        scorers[folder], _ = _kept(kept, setup, role, lambda: _compiler().compile_scorer(setup, found.model))  # noqa: B023
    return measure, scorers


def _kept(folder: Path | None, setup: RunSetup, role: str, make: Callable[[], Program]) -> tuple[Program, str]:
    """The program that `folder` keeps for `role`, else that of `make`, and a line on where it comes from."""
    if folder is None:
        return make(), "program compiled, and not kept because of compile_cache=null"
    return ProgramCache(folder).get(program_key(setup, role), make)


def _compiler() -> ModuleType:
    return importlib.import_module("mpar.train.compile")
