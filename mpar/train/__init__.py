"""Training: the configuration, the loop of a rank, its state, metrics and watchdog. Importing a name does not import the
compiler, which `mpar.train.prepare` needs, nor the plotting library that `mpar.train.curve` needs.

Names are imported when they are first used, so that a wrong configuration is refused before torch is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpar.train._check_values import value_problems
    from mpar.train._config import (
        HardwareConfig,
        MeshConfig,
        ModelConfig,
        PlainConfig,
        PlainValue,
        PlanConfig,
        StrategyConfig,
        TrainConfig,
    )
    from mpar.train._duration import deadline_after, seconds
    from mpar.train._evaluation import Evaluation, HeldOutEvaluation
    from mpar.train._experts import ExpertLoad, expert_load, side_losses
    from mpar.train._job import Job, read_job, write_job
    from mpar.train._job_folder import DATA_FOLDER, MALFORMED_FILE, write_run_dir
    from mpar.train._kept_job import find_kept_job
    from mpar.train._key import BOUNDS, bounds_of, key, outside, within_bounds
    from mpar.train._loop import Rank, run_steps, start
    from mpar.train._mesh_name import MESH_EXAMPLES, MESH_GRAMMAR, mesh_by_name, mesh_problem, nearest_mesh_name
    from mpar.train._metrics import MetricsFile, StepRecord, flops_per_token, read_metrics, tensorboard_writer, wandb_writer
    from mpar.train._origin import steps_done
    from mpar.train._place import Phase, Place, read_place
    from mpar.train._plug_ins import PLUGGABLE, plug_ins, values_of_reference, with_options
    from mpar.train._reference import Reference, with_reference
    from mpar.train._rollouts import ROLLOUTS_FOLDER, RolloutPrograms, draw_rollouts
    from mpar.train._run_data import RunData, load_data, make_tokenizer, training_data
    from mpar.train._saving import Saving
    from mpar.train._setup import (
        RunSetup,
        make_hardware,
        make_mesh,
        make_optimizer,
        make_setup,
        make_strategy,
        num_threads,
    )
    from mpar.train._sizes import batch_size, num_microbatches, seq_len
    from mpar.train._state import Progress, fresh_state, load_params, load_state, resume_from
    from mpar.train._stop import Stop
    from mpar.train._watch import Watch, describe_place, waits_for_others

_HOME = {
    "value_problems": "_check_values",
    "BOUNDS": "_key",
    "bounds_of": "_key",
    "outside": "_key",
    "within_bounds": "_key",
    "key": "_key",
    "HardwareConfig": "_config",
    "MeshConfig": "_config",
    "ModelConfig": "_config",
    "PlainConfig": "_config",
    "PlainValue": "_config",
    "PlanConfig": "_config",
    "StrategyConfig": "_config",
    "TrainConfig": "_config",
    "deadline_after": "_duration",
    "seconds": "_duration",
    "Stop": "_stop",
    "steps_done": "_origin",
    "PLUGGABLE": "_plug_ins",
    "plug_ins": "_plug_ins",
    "values_of_reference": "_plug_ins",
    "with_options": "_plug_ins",
    "Phase": "_place",
    "Evaluation": "_evaluation",
    "HeldOutEvaluation": "_evaluation",
    "ExpertLoad": "_experts",
    "expert_load": "_experts",
    "side_losses": "_experts",
    "DATA_FOLDER": "_job_folder",
    "MALFORMED_FILE": "_job_folder",
    "write_run_dir": "_job_folder",
    "find_kept_job": "_kept_job",
    "Job": "_job",
    "read_job": "_job",
    "write_job": "_job",
    "Rank": "_loop",
    "run_steps": "_loop",
    "start": "_loop",
    "MESH_EXAMPLES": "_mesh_name",
    "MESH_GRAMMAR": "_mesh_name",
    "mesh_by_name": "_mesh_name",
    "mesh_problem": "_mesh_name",
    "nearest_mesh_name": "_mesh_name",
    "MetricsFile": "_metrics",
    "StepRecord": "_metrics",
    "flops_per_token": "_metrics",
    "read_metrics": "_metrics",
    "tensorboard_writer": "_metrics",
    "wandb_writer": "_metrics",
    "Reference": "_reference",
    "with_reference": "_reference",
    "ROLLOUTS_FOLDER": "_rollouts",
    "RolloutPrograms": "_rollouts",
    "draw_rollouts": "_rollouts",
    "RunData": "_run_data",
    "load_data": "_run_data",
    "make_tokenizer": "_run_data",
    "training_data": "_run_data",
    "Saving": "_saving",
    "RunSetup": "_setup",
    "make_hardware": "_setup",
    "make_mesh": "_setup",
    "make_optimizer": "_setup",
    "make_setup": "_setup",
    "make_strategy": "_setup",
    "batch_size": "_sizes",
    "num_microbatches": "_sizes",
    "seq_len": "_sizes",
    "num_threads": "_setup",
    "Progress": "_state",
    "fresh_state": "_state",
    "load_params": "_state",
    "load_state": "_state",
    "resume_from": "_state",
    "Place": "_place",
    "Watch": "_watch",
    "describe_place": "_watch",
    "waits_for_others": "_watch",
    "read_place": "_place",
}

__all__ = [
    "BOUNDS",
    "DATA_FOLDER",
    "MALFORMED_FILE",
    "MESH_EXAMPLES",
    "MESH_GRAMMAR",
    "PLUGGABLE",
    "ROLLOUTS_FOLDER",
    "Evaluation",
    "ExpertLoad",
    "HardwareConfig",
    "HeldOutEvaluation",
    "Job",
    "MeshConfig",
    "MetricsFile",
    "ModelConfig",
    "Phase",
    "Place",
    "PlainConfig",
    "PlainValue",
    "PlanConfig",
    "Progress",
    "Rank",
    "Reference",
    "RolloutPrograms",
    "RunData",
    "RunSetup",
    "Saving",
    "StepRecord",
    "Stop",
    "StrategyConfig",
    "TrainConfig",
    "Watch",
    "batch_size",
    "bounds_of",
    "deadline_after",
    "describe_place",
    "draw_rollouts",
    "expert_load",
    "find_kept_job",
    "flops_per_token",
    "fresh_state",
    "key",
    "load_data",
    "load_params",
    "load_state",
    "make_hardware",
    "make_mesh",
    "make_optimizer",
    "make_setup",
    "make_strategy",
    "make_tokenizer",
    "mesh_by_name",
    "mesh_problem",
    "nearest_mesh_name",
    "num_microbatches",
    "num_threads",
    "outside",
    "plug_ins",
    "read_job",
    "read_metrics",
    "read_place",
    "resume_from",
    "run_steps",
    "seconds",
    "seq_len",
    "side_losses",
    "start",
    "steps_done",
    "tensorboard_writer",
    "training_data",
    "value_problems",
    "values_of_reference",
    "waits_for_others",
    "wandb_writer",
    "with_options",
    "with_reference",
    "within_bounds",
    "write_job",
    "write_run_dir",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mpar.train' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"mpar.train.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
