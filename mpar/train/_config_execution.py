"""Groups of a configuration that say how a step is carried out: mesh, strategy, schedule, precision, recomputation, hardware."""

from dataclasses import dataclass
from typing import Any, Literal

from mpar.train._key import key

__all__ = ["HardwareConfig", "MeshConfig", "PrecisionConfig", "RecomputeConfig", "ScheduleConfig", "StrategyConfig"]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first; their product is the number of ranks."""

    pp: int = key("positions of the pipeline; each has schedule.num_chunks stages", default=1, at_least=1)
    dp: int = key("data parallel ranks over which ZeRO does not shard storage", default=1, at_least=1)
    fsdp: int = key("data parallel ranks over which ZeRO shards storage", default=1, at_least=1)
    cp: int = key("ranks that share each sequence; ZeRO shards storage over them, too", default=1, at_least=1)
    tp: int = key("ranks that share each layer; they communicate most often", default=1, at_least=1)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Which tensors are sharded over which mesh axes. A null leaves the value that the preset `name` has."""

    name: str = key("a preset: ddp, zero1, zero2, zero3 or hsdp, each also with _tp or _tp_sp; or tp, tp_sp")
    reduce: Literal["each", "last"] | None = key(
        "when gradients are reduced: after each microbatch, or after the last; null: by the preset", default=None
    )
    gather: Literal["drop", "keep"] | None = key(
        "gathered parameters: drop them after a layer, and gather again for its backward, or keep them for the step", default=None
    )
    context_parallel: Literal["auto", "ring", "all_gather", "all_to_all", "all_to_all+ring"] | None = key(
        "how the ranks of cp compute attention over the sequence that they share; auto: by predicted time", default=None
    )
    ulysses_size: int | None = key(
        "all_to_all: ranks that divide attention by heads; null: as many as the heads allow",
        default=None,
        at_least=1,
    )
    sequence: Literal["auto", "zigzag", "contiguous"] | None = key(
        "positions that a rank of cp has: zigzag is an early and a late part; auto is zigzag where the model allows",
        default=None,
    )
    expert_parallel: int | None = key(
        "ranks over which the experts of a layer are spread; null: not spread", default=None, at_least=1
    )
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
        "parts into which a batch is cut; null: 1 without a pipeline, else 2 * mesh.pp; twice as many if `paired`",
        default=None,
        at_least=1,
    )
    num_slices: int = key(
        "slices into which the sequences of a microbatch are cut; with recompute=full the activations of one are in memory",
        default=1,
        at_least=1,
    )
    paired: bool = key(
        "two microbatches at a time, in 1F1B and dual_pipe* a forward and a backward: messages of one hide behind the other",
        default=False,
    )
    num_chunks: int | None = key(
        "stages of each position; null: the number that the schedule is made for", default=None, at_least=1
    )
    layout: str | tuple[int, ...] | None = key(
        "segments of each stage; null: even; `balance`: by cost; or letters `Et*3|(tt|)*29,m|L`; or layers of each stage",
        default=None,
    )
    bucket_bytes: int = key(
        "gathers and reductions of neighbouring layers are joined up to this size; 0: none are", default=32 * 2**20, at_least=0
    )
    prefetch_bytes: int | None = key(
        "gathers that make at most this much are issued a layer early; null: those that fit, if `hardware` overlaps; 0: none",
        default=None,
        at_least=0,
    )
    options: dict[str, Any] = key("options of the schedule, such as extra_warmup", default_factory=dict)
    plugin: str | None = key("module:function that gives the orders; `schedule=module:function` sets it", default=None)
    table: str | None = key("a file with the actions of every position, in torch's format; replaces `name`", default=None)


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
    budget: int = key("budget: bytes that one segment may keep on a rank", default=0, at_least=0)
    offload: bool = key("move what a forward keeps to the memory of the host until the backward needs it", default=False)


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The hardware profile: rates from which times are predicted."""

    name: str = key("what the hardware is called")
    flops_per_s: dict[str, float] = key("achieved FLOP/s of large products by dtype", above=0)
    memory_bytes_per_s: float = key("achieved bandwidth of device memory", above=0)
    memory_bytes: int = key("memory of one device", above=0)
    link_bytes_per_s: float = key("one rank's bandwidth within a node", above=0)
    link_latency_s: float = key("time of an empty message within a node", at_least=0)
    cross_bytes_per_s: float = key("one rank's bandwidth between nodes", above=0)
    cross_latency_s: float = key("time of an empty message between nodes", at_least=0)
    ranks_per_node: int = key("devices in a node", at_least=1)
    overlaps: bool = key("whether communication and copies run while the device computes", default=True)
    host_bytes_per_s: float = key("bandwidth between a device and the memory of its host", default=5e10, above=0)
    launch_s: float = key("fixed time of one op", default=0.0, at_least=0)
    hop_s: float = key("time that each further rank adds to a gather", default=0.0, at_least=0)
    contention: float = key("share by which computation is slower beside a collective", default=0.0, at_least=0)
    multiprocessors: int = key("of a GPU, for tiles of products; 0: no rate depends on shapes", default=0, at_least=0)
    wave_s: float = key("time between two waves of tiles", default=0.0, at_least=0)
    vector_flops_per_s: float = key("achieved FLOP/s of all but products; 0: as products", default=0.0, at_least=0)
    op_factors: dict[str, float] = key(
        "by primitive, how often longer it takes than these rates say", default_factory=dict, above=0
    )
    op_launch_s: dict[str, float] = key("fixed time of one call by primitive, if not launch_s", default_factory=dict, at_least=0)
    transcendentals_per_s: float = key("exponentials and the like; 0: they take no time", default=0.0, at_least=0)
    attention_flops_per_s: dict[str, float] = key(
        "achieved FLOP/s of long attention, forward and backward", default_factory=dict, above=0
    )
    peak_flops_per_s: float = key("data-sheet peak, for MFU", default=0.0, at_least=0)
    arch: str | None = key("the chip for which kernels are chosen, such as sm_90; null: a CPU", default=None)
