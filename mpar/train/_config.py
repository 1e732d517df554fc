"""What a training run is made of: one frozen dataclass per configuration group. A field's `doc` is what `--help` prints."""

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
"""A configuration as plain data: what composing gives, and what a run and its checkpoints record."""


def key(doc: str, *, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """A field with its line of `--help`; a default is for keys that a file may leave out."""
    return field(metadata={"doc": doc}, default=default, default_factory=default_factory)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: `config` in the words of Hugging Face's config.json, or a folder that holds one, and the weights."""

    name: str = key("what the model is called in file names and on the screen")
    seq_len: int = key("the sequence length that it is trained with unless data.seq_len says otherwise")
    config: dict[str, Any] | None = key("keys of config.json, model_type among them", default=None)
    path: str | None = key("a folder of Hugging Face: its config.json is the model, its weights the start", default=None)
    random_init: bool = key("start from fresh weights even if `path` holds some", default=False)
    ignore: tuple[str, ...] = key("keys of config.json that mpar does not know and that change nothing", default=())
    vocab_multiple: int = key("the vocabulary is padded to a multiple of this", default=128)
    logits_chunk: int | None = key("tokens whose logits are made at once; null makes all", default=None)
    mlp_chunk: int | None = key("tokens whose feed-forward layers are computed at once; null: all", default=None)
    mtp_loss_weight: float | None = key(
        "multi-token prediction: a further layer learns the token after the next, its loss times this; null: none", default=None
    )
    router: dict[str, Any] | None = key(
        "routers of experts: capacity_factor, padded, token_groups=[2,1] or group=rank, losses, the rate of their bias",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class DataGroup:
    """The data."""

    sources: tuple[str, ...] = key("files, globs, self-cognition or python-stdlib; `#100` behind one takes 100 rows of it")
    batch_size: int | None = key("sequences a step, all ranks together; null: 8, rounded up to what mesh and microbatches need")
    seq_len: int | None = key("positions of a sequence; null: model.seq_len", default=None)
    packing: bool = key("documents share a sequence and do not see each other", default=True)
    shuffle: bool = key("a new order every epoch", default=True)
    truncation: Literal["drop", "truncate", "error"] = key("what becomes of longer conversations", default="drop")
    tokenizer: str | None = key(
        "`bytes`, or a folder with tokenizer.json; null: the folder of the model, else bytes", default=None
    )
    model_name: str | tuple[str, str] | None = key("put in place of {{NAME}}; a pair is [Chinese, English]", default=None)
    model_author: str | tuple[str, str] | None = key("put in place of {{AUTHOR}}; a pair is [Chinese, English]", default=None)
    system: str | None = key("system message of conversations that have none", default=None)
    cache_dir: str | None = key("folder that keeps tokenised data between runs", default=None)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is learned from the data."""

    kind: Literal["sft", "pt"] = key("sft: conversations, loss on answers; pt: plain text, loss on every token")
    loss: Literal["all", "last_round"] = key("sft: answers that count", default="all")
    chat: tuple[str, ...] = key("questions that the trained model answers at the end", default=())
    max_new_tokens: int = key("length of these answers", default=128)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first; their product is the number of ranks."""

    pp: int = key("ranks that a pipeline is made of; each has schedule.num_chunks stages", default=1)
    dp: int = key("replicas that share no storage", default=1)
    fsdp: int = key("data parallel ranks over which ZeRO shards storage", default=1)
    cp: int = key("ranks that share a sequence, and ZeRO's storage", default=1)
    tp: int = key("tensor parallel ranks, which talk most", default=1)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Which tensors are sharded over which mesh axes; null is the preset's."""

    name: str = key("a preset: ddp, zero1, zero2, zero3 or hsdp, with _tp or _tp_sp behind it; or tp, tp_sp")
    reduce: Literal["each", "last"] | None = key("reduce gradients every microbatch or once; null: by the preset", default=None)
    context_parallel: Literal["auto", "ring", "all_gather", "all_to_all", "all_to_all+ring"] | None = key(
        "how attention divides a sequence that ranks of cp share; auto: by predicted time", default=None
    )
    ulysses_size: int | None = key(
        "all_to_all: ranks that share a part of a sequence by heads; null: as many as can", default=None
    )
    sequence: Literal["auto", "zigzag", "contiguous"] | None = key(
        "positions that a rank of cp has: zigzag is an early and a late part, auto zigzag where the model can", default=None
    )
    expert_parallel: int | None = key("ranks over which the experts of a layer are spread; null: none", default=None)
    expert_axes: tuple[str, ...] | None = key("mesh axes for it, first come first taken; null: the innermost", default=None)
    dispatcher: Literal["all_to_all", "all_gather"] | None = key(
        "all_to_all: tokens travel to the ranks of their experts; all_gather: all of these get every token", default=None
    )
    expert_tensor_parallel: bool | None = key("tp shards the inside of experts, too, where it holds none", default=None)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How microbatches go through the stages of a pipeline."""

    name: str = key("a schedule: `ls conf/schedule`", default="one_f_one_b")
    num_microbatches: int | None = key(
        "parts into which a batch is cut; null: 1 without pipeline, else 2 * mesh.pp", default=None
    )
    num_slices: int = key(
        "equal parts of a microbatch's sequences that layers take one after the other: with recompute=full memory of one",
        default=1,
    )
    num_chunks: int | None = key("stages of each rank; null: as many as the schedule is made for", default=None)
    layout: str | tuple[int, ...] | None = key(
        "segments of each stage: null is even, `balance` by cost, letters `Et*3|(tt|)*29,m|L`, or layers of each stage",
        default=None,
    )
    options: dict[str, Any] = key("of the schedule, such as extra_warmup", default_factory=dict)
    table: str | None = key("a file with the actions of every rank, as torch writes them; replaces `name`", default=None)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update and the learning rate."""

    kind: Literal["adamw", "sgd"] = key("the rule")
    lr: float = key("peak learning rate")
    lr_decay: Literal["constant", "linear", "cosine", "wsd"] = key("how the rate falls after warm-up", default="cosine")
    warmup_steps: int | None = key("steps in which the rate rises", default=None)
    warmup_ratio: float | None = key("the same as a part of all steps", default=None)
    min_lr: float | None = key("the rate at the end", default=None)
    min_ratio: float | None = key("the same as a part of lr", default=None)
    decay_ratio: float | None = key("wsd: the part of all steps in which the rate falls", default=None)
    betas: tuple[float, float] = key("adamw: decay of the two moments", default=(0.9, 0.95))
    eps: float = key("adamw: added to the root of the second moment", default=1e-8)
    momentum: float = key("sgd: momentum", default=0.0)
    weight_decay: float = key("decoupled decay", default=0.1)
    clip_norm: float | None = key("bound on the global gradient norm; null does not clip", default=1.0)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of compute; masters are float32."""

    name: Literal["fp32", "bf16"] = key("dtype of parameters and activations in use")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What backward computes again instead of keeping it."""

    kind: Literal["none", "full", "selective", "budget"] = key("the policy")
    names: tuple[str, ...] | None = key("selective: what is computed again; null: norms, activations, casts", default=None)
    budget: int = key("budget: bytes that one segment may keep on a rank", default=0)
    offload: bool = key("what is kept waits for the backward in the memory of the host", default=False)


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Rates from which times are predicted."""

    name: str = key("what the device is called")
    flops_per_s: dict[str, float] = key("achieved FLOP/s by dtype")
    memory_bytes_per_s: float = key("achieved bandwidth of device memory")
    memory_bytes: int = key("memory of one device")
    link_bytes_per_s: float = key("one rank's bandwidth within a node")
    link_latency_s: float = key("time of an empty message within a node")
    cross_bytes_per_s: float = key("one rank's bandwidth between nodes")
    cross_latency_s: float = key("time of an empty message between nodes")
    ranks_per_node: int = key("devices in a node")
    launch_s: float = key("fixed time of one segment", default=0.0)
    peak_flops_per_s: float = key("data-sheet peak, for MFU", default=0.0)
    arch: str | None = key("its chip, for which kernels are chosen, such as sm_90; null is a CPU", default=None)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int | None = key("save every so many steps, besides at the end; null: only at the end", default=None)
    keep: int | None = key("how many are kept; null keeps all", default=2)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loss on data that are not trained on; there is none unless `sources` or `fraction` is given."""

    every: int | None = key("evaluate every so many steps, besides at the end; null: only at the end", default=None)
    sources: tuple[str, ...] | None = key("data of their own, named like data.sources", default=None)
    fraction: float | None = key("or this part of the rows of data.sources, which are then not trained on", default=None)
    batches: int | None = key("batches that are looked at each time; null: all of them", default=None)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What `mpar plan` prints."""

    out: str | None = key("file for the whole program", default=None)
    timeline: str | None = key("file for a picture of the step: .html, .svg, or .json for chrome://tracing", default=None)
    compare: tuple[str, ...] = key("schedules to put beside each other", default=())
    diff: tuple[str, ...] = key("`key=value`, as on the command line: print how the program changes with it", default=())
    rank: int = key("whose program", default=0)
    lines: int = key("instructions shown on the screen", default=24)


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
    experiment: str | None = key("a file of differences in conf/experiment", default=None)
    steps: int = key("optimizer updates")
    seed: int = key("of weights and of the order of data", default=0)
    run_dir: str | None = key("where everything is left; null: runs/<date>_<time>", default=None)
    resume: str = key("auto: go on from the newest checkpoint in run_dir; never; or a checkpoint's folder", default="auto")
    device: Literal["cpu", "cuda"] = key("where the ranks compute", default="cpu")
    kernels: Literal["auto", "triton", "torch"] = key(
        "auto: the best that a primitive has for the chip; triton: mpar's, or an error; torch: none of them", default="auto"
    )
    execution: Literal["eager", "inductor", "cuda_graph"] = key(
        "eager: generated code as it is; inductor: through torch.compile; cuda_graph: the step recorded and replayed, on one GPU",
        default="eager",
    )
    num_threads: int | None = key("threads of a rank; null: cores / local ranks", default=None)
    timeout_s: float = key("how long a rank waits for another one", default=600.0)
    progress: bool = key("show a progress bar", default=True)
    tensorboard: bool = key("write event files, if tensorboard is installed", default=True)
