"""The configuration of a training run: one frozen dataclass for each group. `--help` prints the `doc` of each field."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mpar.plain_value import PlainValue
from mpar.train._key import key
from mpar.train._rollout_keys import RolloutKeys

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
class ModelConfig:
    """The model: `config`, with the keys of a config.json of Hugging Face; a folder with that file and weights; or a plug-in."""

    name: str = key("what the model is called in file names and on the screen")
    seq_len: int = key("positions of a sequence, unless data.seq_len is given", at_least=1)
    config: dict[str, Any] | None = key("the keys of a config.json, such as model_type", default=None)
    path: str | None = key("a Hugging Face folder: its config.json is the model, training starts from its weights", default=None)
    random_init: bool = key("start from fresh weights even if `path` has some", default=False)
    ignore: tuple[str, ...] = key("keys of config.json to ignore, which mpar would refuse as unknown", default=())
    vocab_multiple: int = key("the vocabulary is padded to a multiple of this", default=128, at_least=1)
    logits_chunk: int | None = key("make logits for this many tokens at a time; null: all at once", default=None, at_least=1)
    mlp_chunk: int | None = key(
        "compute feed-forward networks for this many tokens at a time; null: all at once", default=None, at_least=1
    )
    mtp_loss_weight: float | None = key(
        "multi-token prediction: a further layer learns the token after the next; its loss has this weight; null: no such layer",
        default=None,
        at_least=0,
    )
    dropout: float | None = key(
        "training drops features of embeddings, and of what attention and feed-forward add, with this probability; null: none",
        default=None,
        at_least=0,
    )
    quantise: Literal["nf4", "int8"] | None = key(
        "freeze linear layers and experts as codes of 4 or 8 bits, which are dequantised where they are used; null: none",
        default=None,
    )
    quantise_exclude: tuple[str, ...] = key(
        "ends of the names of matrices that are not quantised, such as [down_proj]", default=()
    )
    router: dict[str, Any] | None = key(
        "options of expert routers: capacity_factor, padded, token_groups=[2,1] or group=rank, side losses, bias_rate",
        default=None,
    )
    plugin: str | None = key("module:function that makes the model; `model=module:function` sets it", default=None)
    options: dict[str, Any] = key("parameters of the plug-in; `model.NAME=value` sets one", default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataGroup:
    """The data."""

    sources: tuple[str, ...] = key(
        "files, folders, globs, addresses, self-cognition, python-stdlib, NAME of NAME.bin and NAME.idx; NAME#100 is 100 rows"
    )
    columns: dict[str, str] = key(
        "for names of columns in the files, those that formats have, such as {ask: query, reply: response}", default_factory=dict
    )
    preprocess: str | None = key(
        "module:function of your own: from the columns of a row as a dict to others, a list of rows, or None to leave it out",
        default=None,
    )
    weights: tuple[float, ...] | None = key("the share of each source; null: every row of every source", default=None)
    stop: Literal["first", "all"] = key(
        "with weights, first: until a source is used up; all: until all are, rows of the others are repeated", default="first"
    )
    batch_size: int | None = key(
        "sequences of a step, on all ranks together; null: 8, rounded up to fit mesh and microbatches", at_least=1
    )
    seq_len: int | None = key("positions of a sequence; null: model.seq_len", default=None, at_least=1)
    packing: bool = key("several documents share a sequence, without attending to each other", default=True)
    pad_to_multiple: int = key(
        "each document begins at a multiple of so many positions, behind padding; it divides seq_len", default=1, at_least=1
    )
    shuffle: bool = key("use a new order of the data in every epoch", default=True)
    truncation: Literal["drop", "right", "left", "split", "error"] = key(
        "conversations longer than seq_len: drop them, cut at the right or left, split them into documents, or stop",
        default="drop",
    )
    token_weights: str = key(
        "what tokens weigh in the loss: default (answers), last_round or all, then + ignore_empty_think, ignore_think_prefix, "
        "hermes, react, qwen, agentflan, alpha_umi, or rows (weights that rows give)",
        default="default",
    )
    tokenizer: str | None = key(
        "`bytes`, or a folder with a tokenizer; null: the folder of the model if it has one, else bytes", default=None
    )
    model_name: str | tuple[str, str] | None = key(
        "replaces {{NAME}} in data; a pair is [Chinese, English]", default=None, prose=True
    )
    model_author: str | tuple[str, str] | None = key(
        "replaces {{AUTHOR}} in data; a pair is [Chinese, English]", default=None, prose=True
    )
    system: str | None = key("system message for conversations that have none", default=None, prose=True)
    cache_dir: str | None = key("folder in which tokenised data are kept from run to run", default=None)
    stream: bool = key(
        "rows are read while the run goes on, in blocks of shuffle_rows, over and over; false: all of them before the first step",
        default=False,
    )
    shuffle_rows: int = key(
        "of a stream, the rows of a block, within which they are shuffled and packed", default=10_000, at_least=1
    )
    workers: int = key(
        "processes that tokenise; 1: the one that reads, of a stream one beside each machine's ranks; 0: of a stream, the ranks "
        "themselves",
        default=1,
        at_least=0,
    )
    strict: bool = key("a malformed row is an error; false: run_dir/malformed.jsonl lists malformed rows", default=False)
    num_samples: int | None = key(
        "of indexed tokens, the samples of the whole run, on which their order depends; null: steps times batch_size",
        default=None,
        at_least=1,
    )
    isolate: bool = key(
        "of indexed tokens: documents in a sample do not attend to each other; false: as Megatron's default", default=True
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig(RolloutKeys):
    """What is learned from the data."""

    kind: Literal["sft", "pt", "preference", "kto", "prompt"] = key(
        "rows of the data: sft: conversations, with labels on answers; pt: plain text, with labels on every token; preference: "
        "pairs of a chosen and a rejected answer; kto: answers with a label; prompt: questions that the model answers as it is "
        "trained"
    )
    learn: Literal["next_token", "dpo", "kto", "orpo", "cpo", "reward", "prm", "dft", "grpo"] = key(
        "what is learned from them; the keys from `loss` to `centre` are its options, null: its default",
        default="next_token",
    )
    answers: int = key("the most answers that a sequence may hold; the two of a pair are both counted", default=32, at_least=1)
    loss: str | dict[str, float] | None = key(
        "dpo: sigmoid, robust, hinge, ipo, sigmoid_norm, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop, "
        "sft, or a sum {sigmoid: 1, sft: 0.2}; kto: kto, apo_zero_unpaired; cpo: sigmoid, hinge, ipo, simpo; "
        "grpo: dapo, grpo, bnpo, dr_grpo, cispo",
        default=None,
    )
    beta: float | Literal["data"] | None = key(
        "how strongly the model is held to what it was; data: the column `beta` of each row", default=None
    )
    reference: Literal["frozen", "adapter", "columns", "none"] | None = key(
        "dpo, kto: the model that is compared with: `frozen`, a copy in the same program; `columns`: its log-probabilities, "
        "computed once before the first step, and kept; `adapter`: the model without its adapter; none; null: adapter if there "
        "is one, else frozen",
        default=None,
    )
    label_smoothing: float | None = key("dpo, cpo: the share of pairs that may be labelled wrongly", default=None, at_least=0)
    rpo_alpha: float | None = key("dpo: adds so much of the loss of the chosen answer", default=None, at_least=0)
    ld_alpha: float | None = key(
        "dpo: what tokens beyond the length of the shorter answer weigh", default=None, at_least=0, at_most=1
    )
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = key(
        "dpo: what holds the model to the reference model", default=None
    )
    divergence_alpha: float | None = key("dpo: of divergence=alpha", default=None)
    gamma: float | None = key("cpo with loss=simpo: the margin", default=None, at_least=0)
    cpo_alpha: float | None = key("cpo: adds so much of the loss of the chosen answer", default=None, at_least=0)
    prompt: bool | None = key("orpo: whether the tokens of the prompt are learned, too", default=None)
    desirable_weight: float | None = key("kto: what good answers weigh", default=None, at_least=0)
    undesirable_weight: float | None = key("kto: what bad answers weigh", default=None, at_least=0)
    margin: float | Literal["data"] | None = key("reward: the margin; data: the column `margin` of each row", default=None)
    centre: float | None = key("reward: holds the sum of both scores near zero", default=None, at_least=0)
    chat: tuple[str, ...] | None = key(
        "questions that the trained model answers at the end; null: those of the sample data, if it learned them",
        default=None,
    )
    max_new_tokens: int = key("the most tokens of such an answer", default=128, at_least=1)
    plugin: str | None = key(
        "module:function that makes the chain to train of the model: it has another loss; `task=module:function` sets it",
        default=None,
    )
    options: dict[str, Any] = key("parameters of the plug-in; `task.NAME=value` sets one", default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Small matrices that are trained in the place of the weights; names and meanings are those of PEFT."""

    kind: Literal["lora"] | None = key("lora: with adapters; null: without", default=None)
    rank: int = key("columns of A and rows of B", default=8, at_least=1)
    alpha: float = key("A B is multiplied by alpha / rank", default=16.0, above=0)
    dropout: float = key("training drops features of what A reads with this probability", default=0.0, at_least=0, below=1)
    rslora: bool = key("A B is multiplied by alpha / sqrt(rank) instead", default=False)
    dora: bool = key("train a magnitude for each output, too", default=False)
    init: Literal["kaiming", "gaussian", "random", "pissa", "olora"] = key("how A and B begin", default="kaiming")
    targets: str | tuple[str, ...] = key(
        "all-linear, ends of the names of modules such as [q_proj,v_proj], or a regular expression of full names",
        default="all-linear",
    )
    exclude: str | tuple[str, ...] = key("no adapters for these modules, named likewise", default=())
    layers: tuple[int, ...] | None = key("the numbers of the layers that have adapters; null: all", default=None)
    rank_pattern: dict[str, int] = key("other ranks, by a regular expression of the end of a name", default_factory=dict)
    alpha_pattern: dict[str, float] = key("other values of alpha, likewise", default_factory=dict)
    modules_to_save: tuple[str, ...] = key("modules that are trained in full, such as [lm_head]", default=())
    bias: Literal["none", "all", "lora_only"] = key("which biases are trained", default="none")
    b_rate: float = key("the learning rate of B is multiplied by this (LoRA+)", default=1.0, above=0)


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
class OptimizerConfig:
    """The update and the learning rate."""

    kind: Literal["adamw", "sgd", "lion", "muon", "soap"] | None = key("the rule of the update; null: that of `plugin`")
    lr: float = key("peak learning rate", at_least=0)
    lr_decay: Literal["constant", "linear", "cosine", "wsd"] = key("how the rate falls after warm-up", default="cosine")
    warmup_steps: int | None = key("first steps in which the rate rises; null: by warmup_ratio", default=None, at_least=0)
    warmup_ratio: float | None = key(
        "the same as a share of all steps, unless warmup_steps is given", default=None, at_least=0, at_most=1
    )
    min_lr: float | None = key("the rate at the end; null: by min_ratio; a constant rate has none", default=None, at_least=0)
    min_ratio: float | None = key("the same as a share of lr, unless min_lr is given", default=None, at_least=0, at_most=1)
    decay_ratio: float | None = key(
        "wsd: the share of all steps, at the end, in which the rate falls", default=None, above=0, at_most=1
    )
    betas: tuple[float, float] = key(
        "adamw and soap, and muon where it is not for matrices: decay of the two moments; lion: of its step and its momentum",
        default=(0.9, 0.95),
        at_least=0,
        below=1,
    )
    eps: float = key("adamw, muon and soap: added to the root of the second moment", default=1e-8, above=0)
    momentum: float = key("sgd and muon: momentum", default=0.0, at_least=0, below=1)
    nesterov: bool = key("muon: the step looks ahead along the momentum", default=True)
    num_rounds: int = key("muon: rounds of Newton-Schulz", default=5, at_least=1)
    adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "muon: the rate of a matrix, so that a rate for adamw fits; or times sqrt(max(1, out / in))", default="match_rms_adamw"
    )
    precondition_frequency: int = key("soap: steps from one computation of eigenvectors to the next", default=10, at_least=1)
    weight_decay: float = key("decoupled weight decay", default=0.1, at_least=0)
    clip_norm: float | None = key("larger gradients are scaled to this global norm; null: no clipping", default=1.0, above=0)
    plugin: str | None = key("module:function that makes the optimizer; `optimizer=module:function` sets it", default=None)
    options: dict[str, Any] = key("parameters of the plug-in; `optimizer.NAME=value` sets one", default_factory=dict)


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


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, what is in them, and which are kept."""

    every: int | None = key(
        "write one after every so many steps, and at the end; null: only at the end", default=None, at_least=1
    )
    keep: int | None = key("how many of the newest are kept; null: all", default=2, at_least=1)
    keep_every: int | None = key("those of steps that this divides are kept, too; null: no others", default=None, at_least=1)
    keep_best: int | None = key("so many of the lowest evaluation loss are kept, too; null: no others", default=None, at_least=1)
    mode: Literal["async", "sync"] = key(
        "async: training goes on while a copy of the state is written; sync: training waits", default="async"
    )
    optimizer_state: bool = key(
        "save the optimizer's state; without it a run cannot go on, only begin from the weights", default=True
    )
    on_damaged: Literal["stop", "move_aside"] = key(
        "if the newest checkpoint in run_dir is damaged, stop: name it; move_aside: rename it, and go on from the one before",
        default="stop",
    )
    check_replicas: int | None = key(
        "compare the copies that several ranks have of the same values after every so many steps; null: never",
        default=None,
        at_least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """How a run goes on. One word is enough: `resume=weights` is `resume.state=weights`, other words are `resume.path`."""

    path: str = key(
        "auto: go on from the newest checkpoint in run_dir, if there is one; never: stop if there is one; or the folder of a "
        "checkpoint or of a run",
        default="auto",
    )
    state: Literal["all", "weights"] = key(
        "weights: take only parameters; the optimizer and its learning rate begin anew, over the steps that are left",
        default="all",
    )
    data: Literal["same", "restart"] = key(
        "same: refuse data that are unlike those of the checkpoint; restart: read unlike data from their beginning; steps go on",
        default="same",
    )
    allow_change: bool = key("go on although the configuration changes the function that the model computes", default=False)

    @staticmethod
    def key_of_word(word: str) -> str:
        """The key that `resume=WORD` sets to WORD."""
        return "state" if word == "weights" else "path"


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Parameters that training does not change. They have no gradient, no state of the optimizer, and no copy in float32."""

    names: tuple[str, ...] = key(
        "patterns of paths of parameters, or of names of Hugging Face tensors, such as model.layers.[0-3].*", default=()
    )
    segments: tuple[str, ...] = key("patterns of names of segments, such as embed or layers.1?", default=())
    ratio: float = key(
        "share of the numbers of the model that are frozen from its beginning on, whole parameters only",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    trainable: tuple[str, ...] = key("patterns like names, of what is trained in spite of these", default=())


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """When a loss or a gradient norm is a spike; on_spike says what happens then."""

    z: float = key("standard deviations above the median of the last steps from which a value is a spike", default=6.0, above=0)
    window: int = key(
        "steps that are looked back over; there are no spikes in the first 16 steps of a run", default=128, at_least=16
    )
    max_skips: int = key("stop if more than this many steps in a row were skipped", default=10, at_least=0)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loss on data that are not trained on. Nothing is evaluated unless `sources` or `fraction` is given, or both."""

    every: int | None = key("evaluate after every so many steps, and at the end; null: only at the end", default=None, at_least=1)
    sources: tuple[str, ...] | dict[str, str | tuple[str, ...]] | None = key(
        "data to evaluate on, as in data.sources; {NAME: FILE, OTHER: [FILES]} are sets with losses of their own", default=None
    )
    fraction: float | None = key(
        "hold this share of the rows of data.sources out of training, to evaluate on", default=None, above=0, below=1
    )
    batches: int | None = key("how many batches of each set an evaluation reads; null: all", default=None, at_least=1)

    @property
    def sets(self) -> dict[str, tuple[str, ...]]:
        """The sources of each set, by its name; without what is held out of the data."""
        if self.sources is None:
            return {}
        if isinstance(self.sources, tuple):
            return {"sources": self.sources}
        return {name: (found,) if isinstance(found, str) else found for name, found in self.sources.items()}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What `mpar plan` prints."""

    out: str | None = key("file for the full program, table or difference", default=None)
    timeline: str | None = key("file for a picture of the step: .html, .svg, or .json for chrome://tracing", default=None)
    compare: tuple[str, ...] = key("schedules to compare in one table", default=())
    diff: tuple[str, ...] = key("overrides, as on the command line: print how the program changes with them", default=())
    profiles: tuple[str, ...] = key(
        "hardware profiles to predict times for, besides `hardware`", default=("h100_dgx", "h200", "b200")
    )
    rank: int = key("the rank whose program is printed", default=0, at_least=0)
    lines: int = key("lines of the program, or of the difference, on the screen", default=24, at_least=0)


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
        "eager: run the generated code; inductor: compile it with torch.compile; cuda_graph: record and replay it, on one GPU",
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
