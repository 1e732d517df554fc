"""The configuration of a training run: groups, each a frozen dataclass, and its own keys. `--help` prints the `doc` of each."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mpar.plain_value import PlainValue
from mpar.train._config_execution import (
    HardwareConfig,
    MeshConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    StrategyConfig,
)
from mpar.train._config_learning import AdapterConfig, DataGroup, FreezeConfig, ModelConfig, OptimizerConfig, TaskConfig
from mpar.train._config_upkeep import CheckpointConfig, EvaluationConfig, PlanConfig, ResumeConfig, SpikeConfig
from mpar.train._key import key

__all__ = [
    "CheckpointConfig",
    "DataGroup",
    "EvaluationConfig",
    "HardwareConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlainConfig",
    "PlainValue",
    "PlanConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "ResumeConfig",
    "ScheduleConfig",
    "SpikeConfig",
    "StrategyConfig",
    "TaskConfig",
    "TrainConfig",
]

PlainConfig: TypeAlias = dict[str, PlainValue]
"""A configuration as plain data: so it is composed, and so a run and its checkpoints record it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `mpar train` or `mpar plan`."""

    model: ModelConfig
    data: DataGroup
    freeze: FreezeConfig = key("what is not trained", default_factory=FreezeConfig)
    task: TaskConfig
    mesh: MeshConfig
    strategy: StrategyConfig
    schedule: ScheduleConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    hardware: HardwareConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    spike: SpikeConfig
    plan: PlanConfig
    adapter: AdapterConfig = key("adapters that are trained in the place of the weights", default_factory=AdapterConfig)
    experiment: str | None = key("a file in conf/experiment that changes other keys", default=None)
    steps: int = key("optimizer updates of the run", at_least=1)
    seed: int = key("seed of fresh weights and of the order of the data", default=0, at_least=0, at_most=2**63 - 1)
    run_dir: str | None = key("folder for everything that the run writes; null: a new one, runs/<date>_<time>", default=None)
    resume: ResumeConfig = key("how a run goes on", default_factory=ResumeConfig)
    init_from: str | None = key(
        "start a new run from the parameters in this folder: a run, a checkpoint, or a Hugging Face folder", default=None
    )
    on_spike: Literal["warn", "skip", "stop"] = key(
        "when loss or gradient norm is a spike: say so; skip the update; or stop. What is not finite is skipped, or else stops",
        default="warn",
    )
    on_zero_gradient: Literal["warn", "stop"] = key("when the gradient norm is exactly zero: say so, or stop", default="warn")
    device: Literal["cpu", "cuda"] = key("where the ranks compute", default="cpu")
    kernels: Literal["auto", "triton", "torch"] = key(
        "auto: mpar's kernels where the chip has them, else torch; triton: mpar's Triton kernels, or an error; torch: no kernels",
        default="auto",
    )
    execution: Literal["eager", "inductor", "cuda_graph"] = key(
        "eager: run the generated code; inductor: compile it, and samplers too; cuda_graph: record and replay it, on one GPU",
        default="eager",
    )
    compile_cache: str | None = key(
        "folder in which programs and jobs are kept from run to run; user: ~/.cache/mpar/programs; null: nothing is kept",
        default="user",
    )
    num_threads: int | None = key(
        "CPU threads of a rank; null: cores divided by the ranks on the machine", default=None, at_least=1, at_most=1024
    )
    timeout_s: float = key("seconds that a rank waits for another one before the run stops", default=600.0, above=0, at_most=1e7)
    time_limit: str | float | None = key(
        "the run stops after this time, such as 3h55m, saves its last step and exits with 124; null: no limit", default=None
    )
    restarts: int = key("how often the run starts again from its newest checkpoint after a rank was lost", default=0, at_least=0)
    progress: bool = key("show the steps: one line that changes on a terminal, else about ten lines", default=True)
    log_every: int | None = key("print a line after every so many steps; null: as progress says", default=None, at_least=1)
    tensorboard: bool = key("write event files, if tensorboard is installed", default=True)
    wandb: bool = key("record with Weights & Biases, which must be installed; WANDB_MODE=offline records here", default=False)
