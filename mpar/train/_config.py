"""The configuration of a training run: one frozen dataclass for each group. `--help` prints the `doc` of each field."""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, TypeAlias

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
    "ScheduleConfig",
    "StrategyConfig",
    "TaskConfig",
    "TrainConfig",
]

PlainValue: TypeAlias = "bool | int | float | str | list[PlainValue] | dict[str, PlainValue] | None"
PlainConfig: TypeAlias = dict[str, PlainValue]
"""A configuration as plain data: so it is composed, and so a run and its checkpoints record it."""


def key(doc: str, *, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """A field with its text for `--help`. A field with a default may be missing in configuration files."""
    return field(metadata={"doc": doc}, default=default, default_factory=default_factory)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: either `config`, with the keys of a config.json of Hugging Face, or a folder with such a file and weights."""

    name: str = key("what the model is called in file names and on the screen")
    seq_len: int = key("positions of a sequence, unless data.seq_len is given")
    config: dict[str, Any] | None = key("the keys of a config.json, such as model_type", default=None)
    path: str | None = key("a Hugging Face folder: its config.json is the model, training starts from its weights", default=None)
    random_init: bool = key("start from fresh weights even if `path` has some", default=False)
    ignore: tuple[str, ...] = key("keys of config.json to ignore, which mpar would refuse as unknown", default=())
    vocab_multiple: int = key("the vocabulary is padded to a multiple of this", default=128)
    logits_chunk: int | None = key("make logits for this many tokens at a time; null: all at once", default=None)
    mlp_chunk: int | None = key("compute feed-forward networks for this many tokens at a time; null: all at once", default=None)
    mtp_loss_weight: float | None = key(
        "multi-token prediction: a further layer learns the token after the next; its loss has this weight; null: no such layer",
        default=None,
    )
    router: dict[str, Any] | None = key(
        "options of expert routers: capacity_factor, padded, token_groups=[2,1] or group=rank, side losses, bias_rate",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class DataGroup:
    """The data."""

    sources: tuple[str, ...] = key("files, globs, self-cognition or python-stdlib; NAME#100 takes 100 rows of a source")
    batch_size: int | None = key("sequences of a step, on all ranks together; null: 8, rounded up to fit mesh and microbatches")
    seq_len: int | None = key("positions of a sequence; null: model.seq_len", default=None)
    packing: bool = key("several documents share a sequence, without attending to each other", default=True)
    shuffle: bool = key("use a new order of the data in every epoch", default=True)
    truncation: Literal["drop", "truncate", "error"] = key("what to do with conversations longer than seq_len", default="drop")
    tokenizer: str | None = key(
        "`bytes`, or a folder with tokenizer.json; null: the folder of the model if it has one, else bytes", default=None
    )
    model_name: str | tuple[str, str] | None = key("replaces {{NAME}} in data; a pair is [Chinese, English]", default=None)
    model_author: str | tuple[str, str] | None = key("replaces {{AUTHOR}} in data; a pair is [Chinese, English]", default=None)
    system: str | None = key("system message for conversations that have none", default=None)
    cache_dir: str | None = key("folder in which tokenised data are kept from run to run", default=None)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned from the data."""

    kind: Literal["sft", "pt"] = key("sft: conversations, with the loss on answers; pt: plain text, with the loss on every token")
    loss: Literal["all", "last_round"] = key("sft: the answers of a conversation that have a loss", default="all")
    chat: tuple[str, ...] = key("questions that the trained model answers at the end", default=())
    max_new_tokens: int = key("the most tokens of such an answer", default=128)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first; their product is the number of ranks."""

    pp: int = key("positions of the pipeline; each has schedule.num_chunks stages", default=1)
    dp: int = key("data parallel ranks over which ZeRO does not shard storage", default=1)
    fsdp: int = key("data parallel ranks over which ZeRO shards storage", default=1)
    cp: int = key("ranks that share each sequence; ZeRO shards storage over them, too", default=1)
    tp: int = key("ranks that share each layer; they communicate most often", default=1)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Which tensors are sharded over which mesh axes. A null leaves the value that the preset `name` has."""

    name: str = key("a preset: ddp, zero1, zero2, zero3 or hsdp, each also with _tp or _tp_sp; or tp, tp_sp")
    reduce: Literal["each", "last"] | None = key(
        "when gradients are reduced: after each microbatch, or after the last; null: by the preset", default=None
    )
    context_parallel: Literal["auto", "ring", "all_gather", "all_to_all", "all_to_all+ring"] | None = key(
        "how the ranks of cp compute attention over the sequence that they share; auto: by predicted time", default=None
    )
    ulysses_size: int | None = key(
        "all_to_all: ranks that divide attention by heads; null: as many as the heads allow", default=None
    )
    sequence: Literal["auto", "zigzag", "contiguous"] | None = key(
        "positions that a rank of cp has: zigzag is an early and a late part; auto is zigzag where the model allows",
        default=None,
    )
    expert_parallel: int | None = key("ranks over which the experts of a layer are spread; null: not spread", default=None)
    expert_axes: tuple[str, ...] | None = key(
        "mesh axes over which experts are spread, used in this order; null: the innermost", default=None
    )
    dispatcher: Literal["all_to_all", "all_gather"] | None = key(
        "all_to_all: tokens are sent to the ranks of their experts; all_gather: all these ranks get every token", default=None
    )
    expert_tensor_parallel: bool | None = key("tp shards also each expert, unless experts are spread over tp", default=None)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How microbatches go through the stages of a pipeline."""

    name: str = key("one of the schedules listed above", default="one_f_one_b")
    num_microbatches: int | None = key(
        "parts into which a batch is cut; null: 1 without a pipeline, else 2 * mesh.pp", default=None
    )
    num_slices: int = key(
        "slices into which the sequences of a microbatch are cut; with recompute=full the activations of one are in memory",
        default=1,
    )
    num_chunks: int | None = key("stages of each position; null: the number that the schedule is made for", default=None)
    layout: str | tuple[int, ...] | None = key(
        "segments of each stage; null: even; `balance`: by cost; or letters `Et*3|(tt|)*29,m|L`; or layers of each stage",
        default=None,
    )
    options: dict[str, Any] = key("options of the schedule, such as extra_warmup", default_factory=dict)
    table: str | None = key("a file with the actions of every position, in torch's format; replaces `name`", default=None)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update and the learning rate."""

    kind: Literal["adamw", "sgd"] = key("the rule of the update")
    lr: float = key("peak learning rate")
    lr_decay: Literal["constant", "linear", "cosine", "wsd"] = key("how the rate falls after warm-up", default="cosine")
    warmup_steps: int | None = key("number of first steps in which the rate rises", default=None)
    warmup_ratio: float | None = key("the same as a share of all steps", default=None)
    min_lr: float | None = key("the rate at the end", default=None)
    min_ratio: float | None = key("the same as a share of lr", default=None)
    decay_ratio: float | None = key("wsd: the share of all steps, at the end, in which the rate falls", default=None)
    betas: tuple[float, float] = key("adamw: decay of the two moments", default=(0.9, 0.95))
    eps: float = key("adamw: added to the root of the second moment", default=1e-8)
    momentum: float = key("sgd: momentum", default=0.0)
    weight_decay: float = key("decoupled weight decay", default=0.1)
    clip_norm: float | None = key("larger gradients are scaled to this global norm; null: no clipping", default=1.0)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The dtype to compute in. Master parameters are float32."""

    name: Literal["fp32", "bf16"] = key("dtype of the parameters and activations that are computed with")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What the backward recomputes instead of the forward keeping it."""

    kind: Literal["none", "full", "selective", "budget"] = key("the policy, as described in conf/recompute")
    names: tuple[str, ...] | None = key(
        "selective: primitives to recompute; null: norms, activation functions, casts", default=None
    )
    budget: int = key("budget: bytes that one segment may keep on a rank", default=0)
    offload: bool = key("move what a forward keeps to the memory of the host until the backward needs it", default=False)


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The hardware profile: rates from which times are predicted."""

    name: str = key("what the hardware is called")
    flops_per_s: dict[str, float] = key("achieved FLOP/s by dtype")
    memory_bytes_per_s: float = key("achieved bandwidth of device memory")
    memory_bytes: int = key("memory of one device")
    link_bytes_per_s: float = key("one rank's bandwidth within a node")
    link_latency_s: float = key("time of an empty message within a node")
    cross_bytes_per_s: float = key("one rank's bandwidth between nodes")
    cross_latency_s: float = key("time of an empty message between nodes")
    ranks_per_node: int = key("devices in a node")
    host_bytes_per_s: float = key("bandwidth between a device and the memory of its host", default=5e10)
    launch_s: float = key("fixed time of one segment", default=0.0)
    peak_flops_per_s: float = key("data-sheet peak, for MFU", default=0.0)
    arch: str | None = key("the chip for which kernels are chosen, such as sm_90; null: a CPU", default=None)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written."""

    every: int | None = key("write one after every so many steps, and at the end; null: only at the end", default=None)
    keep: int | None = key("how many of the newest are kept; null: all", default=2)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loss on data that are not trained on. Nothing is evaluated unless `sources` or `fraction` is given."""

    every: int | None = key("evaluate after every so many steps, and at the end; null: only at the end", default=None)
    sources: tuple[str, ...] | None = key("data to evaluate on, named like data.sources", default=None)
    fraction: float | None = key("hold this share of the rows of data.sources out of training, to evaluate on", default=None)
    batches: int | None = key("how many batches each evaluation reads; null: all", default=None)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What `mpar plan` prints."""

    out: str | None = key("file for the full program, table or difference", default=None)
    timeline: str | None = key("file for a picture of the step: .html, .svg, or .json for chrome://tracing", default=None)
    compare: tuple[str, ...] = key("schedules to compare in one table", default=())
    diff: tuple[str, ...] = key("overrides, as on the command line: print how the program changes with them", default=())
    rank: int = key("the rank whose program is printed", default=0)
    lines: int = key("lines of the program, or of the difference, on the screen", default=24)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `mpar train` or `mpar plan`."""

    model: ModelConfig
    data: DataGroup
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
    plan: PlanConfig
    experiment: str | None = key("a file in conf/experiment that changes other keys", default=None)
    steps: int = key("optimizer updates of the run")
    seed: int = key("seed of fresh weights and of the order of the data", default=0)
    run_dir: str | None = key("folder for everything that the run writes; null: runs/<date>_<time>", default=None)
    resume: str = key(
        "auto: go on from the newest checkpoint in run_dir; never: start afresh; or the folder of a checkpoint", default="auto"
    )
    device: Literal["cpu", "cuda"] = key("where the ranks compute", default="cpu")
    kernels: Literal["auto", "triton", "torch"] = key(
        "auto: mpar's kernels where the chip has them, else torch; triton: mpar's Triton kernels, or an error; torch: no kernels",
        default="auto",
    )
    execution: Literal["eager", "inductor", "cuda_graph"] = key(
        "eager: run the generated code; inductor: compile it with torch.compile; cuda_graph: record and replay it, on one GPU",
        default="eager",
    )
    num_threads: int | None = key("CPU threads of a rank; null: cores divided by the ranks on the machine", default=None)
    timeout_s: float = key("seconds that a rank waits for another one before the run stops", default=600.0)
    progress: bool = key("show a progress bar", default=True)
    tensorboard: bool = key("write event files, if tensorboard is installed", default=True)
