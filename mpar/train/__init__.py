"""Training: the loop of a rank, its state, metrics and watchdog. Importing this does not import the compiler, which
`mpar.train.prepare` needs, nor the plotting library that `mpar.train.curve` needs."""

from mpar.train._config import HardwareConfig, MeshConfig, PlainConfig, PlainValue, PlanConfig, TrainConfig
from mpar.train._evaluation import Evaluation
from mpar.train._experts import ExpertLoad, expert_load, side_losses
from mpar.train._job import Job, read_job, write_job
from mpar.train._loop import Rank, run_steps, start
from mpar.train._mesh_name import MESH_EXAMPLES, MESH_GRAMMAR, mesh_by_name, mesh_problem, nearest_mesh_name
from mpar.train._metrics import MetricsFile, StepRecord, flops_per_token, read_metrics, tensorboard_writer
from mpar.train._run_data import RunData, load_data, make_tokenizer
from mpar.train._setup import (
    RunSetup,
    make_hardware,
    make_mesh,
    make_optimizer,
    make_setup,
    num_microbatches,
    num_threads,
)
from mpar.train._state import Progress, fresh_state, load_params, load_state, resume_from, save_state
from mpar.train._watch import Place, Watch, describe_place, read_place

__all__ = [
    "MESH_EXAMPLES",
    "MESH_GRAMMAR",
    "Evaluation",
    "ExpertLoad",
    "HardwareConfig",
    "Job",
    "MeshConfig",
    "MetricsFile",
    "Place",
    "PlainConfig",
    "PlainValue",
    "PlanConfig",
    "Progress",
    "Rank",
    "RunData",
    "RunSetup",
    "StepRecord",
    "TrainConfig",
    "Watch",
    "describe_place",
    "expert_load",
    "flops_per_token",
    "fresh_state",
    "load_data",
    "load_params",
    "load_state",
    "make_hardware",
    "make_mesh",
    "make_optimizer",
    "make_setup",
    "make_tokenizer",
    "mesh_by_name",
    "mesh_problem",
    "nearest_mesh_name",
    "num_microbatches",
    "num_threads",
    "read_job",
    "read_metrics",
    "read_place",
    "resume_from",
    "run_steps",
    "save_state",
    "side_losses",
    "start",
    "tensorboard_writer",
    "write_job",
]
