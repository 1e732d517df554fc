"""Where the first state of a run comes from, and what changed since; found once, before ranks start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpar import checkpoint, tree
from mpar.checkpoint import Json
from mpar.errors import CheckpointError
from mpar.models import Trainable
from mpar.train._changes import config_changes, function_changes, model_then
from mpar.train._config import PlainConfig, TrainConfig
from mpar.train._data_items import BATCH_SIZE
from mpar.train._setup import RunSetup, trained_model
from mpar.train._state import Progress, check_adapters, checkpoint_in, is_checkpoint, resume_from

__all__ = ["Origin", "find_origin", "steps_done"]

_NOT_OF_A_JOB = (
    *("steps:", "mesh.", "checkpoint.", "compile_cache:", "device:", "execution:", "hardware.", "kernels:", "num_threads:"),
    *("restarts:", "time_limit:", "timeout_s:", "log_every:", "wandb:", "task.chat", "task.max_new_tokens:", "data.cache_dir:"),
)
"""Keys in which a job of a sweep may differ from what it was when the sweep ran before, as the lines of their changes begin."""


@dataclass(frozen=True)
class Origin:
    """resume: the checkpoint to go on from, and `reached`, how far it is. init: the checkpoint or Hugging Face folder with the
    parameters of a new run. changes: a line for each difference from the configuration of the checkpoint, whichever it is.
    """

    resume: Path | None = None
    reached: Progress = Progress()  # noqa: RUF009 (it is frozen)
    init: Path | None = None
    changes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int | None:
        """The sequences of a step of the run that goes on; None if there is none, or its checkpoint does not tell."""
        size = self.reached.data_items.get(BATCH_SIZE)
        return size if isinstance(size, int) else None


def find_origin(setup: RunSetup, resolved: PlainConfig) -> Origin:
    """The origin of the run of `setup`, whose configuration as plain data is `resolved`.

    Raises CheckpointError if there is nothing left to train, if the model computes another function than that of the checkpoint
    and `resume.allow_change` does not allow it, if the optimizer is another one, or if a new run would begin without some of the
    adapters in a checkpoint.
    """
    config = setup.config
    resume = resume_from(Path(str(config.run_dir)), config.resume.path)
    if resume is None:
        origin = _new_run(config, resolved)
        if origin.init is not None and is_checkpoint(origin.init):
            check_adapters(setup.chain if isinstance(setup.chain, Trainable) else setup.model, origin.init)
        return origin
    extras = checkpoint.read_extras(resume)
    reached, then = Progress.from_extras(extras, resume), _config_in(extras)
    if reached.step >= config.steps:
        raise CheckpointError(
            f"nothing to train: {resume} is of step {reached.step} already, and steps={config.steps}.\n"
            "Give a larger steps=, or another run_dir."
        )
    if not config.resume.allow_change:
        _check_function(resume, model_then(then, reached.hf_config), trained_model(config))
        _check_frozen(resume, then, resolved)
    if config.resume.state == "all":
        _check_optimizer(resume, then, str(config.optimizer.plugin or config.optimizer.kind))
    return Origin(resume, reached, changes=tuple(config_changes(then, resolved)))


def steps_done(config: TrainConfig, resolved: PlainConfig, swept: Sequence[str]) -> int:
    """The step of the newest checkpoint in the folder of a job of a sweep; 0 if there is none that can be read and a damaged one
    is moved aside.

    resolved: the configuration of the job as plain data. swept: the keys and groups that have several values in the sweep.
    Folders of jobs have numbers for names, so another sweep may have made this one. Raises CheckpointError if its run had other
    values in the keys that are swept, or in others than those that say how far and on what it runs.
    """
    run_dir = Path(str(config.run_dir))
    try:
        newest = checkpoint.latest(run_dir / "checkpoints")
    except CheckpointError:
        if config.checkpoint.on_damaged == "move_aside":
            return 0
        raise
    if newest is None:
        return 0
    extras = checkpoint.read_extras(newest)
    may_differ = _NOT_OF_A_JOB + (("data.",) if config.resume.data == "restart" else ())
    may_differ += ("model.",) if config.resume.allow_change else ()
    must_not = tuple(f"{key}{end}" for key in swept for end in (":", "."))
    changes = [
        line
        for line in config_changes(_config_in(extras), resolved)
        if line.startswith(must_not) or not line.startswith(may_differ)
    ]
    if changes:
        raise CheckpointError(
            f"cannot go on with job {run_dir.name} of the sweep: {newest} is of a job with other values (then -> now):\n  "
            + "\n  ".join(changes)
            + "\nGive the sweep another run_dir, or the values that it had."
        )
    return Progress.from_extras(extras, newest).step


def _new_run(config: TrainConfig, resolved: PlainConfig) -> Origin:
    if config.init_from is None:
        return Origin()
    folder = Path(config.init_from)
    path = checkpoint_in(folder)
    if path is not None:
        changes = config_changes(_config_in(checkpoint.read_extras(path)), resolved)
        return Origin(init=path, changes=tuple(line for line in changes if line.startswith("model.")))
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"cannot start from the parameters in init_from={folder}: it is neither the run_dir of a run with a checkpoint, nor "
            "the folder of a checkpoint, nor a Hugging Face folder with config.json and safetensors."
        )
    return Origin(init=folder)


def _config_in(extras: Mapping[str, Json]) -> Mapping[str, Json]:
    config = extras.get("config")
    return config if isinstance(config, Mapping) else {}


def _check_function(path: Path, then: Trainable | None, now: Trainable) -> None:
    changes = [] if then is None else function_changes(then, now)
    if then is None or not changes:
        return
    raise CheckpointError(
        f"cannot go on from {path}: the model would compute another function of its parameters (then -> now):\n  "
        + "\n  ".join(changes)
        + "\nRestore these settings (config.yaml in the run_dir has them)"
        + ("; or go on with the new function: resume.allow_change=true." if _shapes(then) == _shapes(now) else ".")
        + " Or begin a new run with a new run_dir"
        + (", from these weights with init_from=." if _shapes(then) == _shapes(now) else ".")
    )


def _check_frozen(path: Path, then: Mapping[str, Json], now: PlainConfig) -> None:
    """Raise CheckpointError if other parameters are frozen than before."""
    changes = [line for line in config_changes(then, now) if line.startswith("freeze.")]
    if changes:
        raise CheckpointError(
            f"cannot go on from {path}: other parameters would be frozen (then -> now):\n  "
            + "\n  ".join(changes)
            + "\nRestore these settings; or train others from here on, with a fresh optimizer: resume=weights "
            "resume.allow_change=true. Or begin a new run with a new run_dir, from these weights with init_from=."
        )


def _shapes(model: Trainable) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(leaf.shape)) for path, leaf in tree.leaves_with_path(model.abstract_params)]


def _check_optimizer(path: Path, then: Mapping[str, Json], kind: str) -> None:
    group = then.get("optimizer")
    before = group.get("plugin") or group.get("kind") if isinstance(group, Mapping) else None
    if before is not None and before != kind:
        raise CheckpointError(
            f"cannot go on from {path} with optimizer={kind}: it has the state of {before}.\n"
            f"Use {before}; or go on with the parameters only, and a fresh optimizer: resume=weights."
        )
