"""Groups of a configuration that say what is learned: model, data, task, adapters, what stays as it is, optimizer."""

from dataclasses import dataclass
from typing import Any, Literal

from mpar.train._key import key
from mpar.train._rollout_keys import RolloutKeys

__all__ = ["AdapterConfig", "DataGroup", "FreezeConfig", "ModelConfig", "OptimizerConfig", "TaskConfig"]


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

    kind: Literal["sft", "pt", "preference", "kto", "prm", "prompt"] = key(
        "rows of the data: sft: conversations, with labels on answers; pt: plain text, with labels on every token; preference: "
        "pairs of a chosen and a rejected answer; kto: answers with a label; prm: answers in steps, each with a label; prompt: "
        "questions that the model answers as it is trained"
    )
    learn: Literal["next_token", "dpo", "kto", "orpo", "cpo", "reward", "prm", "dft", "grpo", "ppo", "gkd"] = key(
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
    gamma: float | None = key("cpo with loss=simpo: the margin; ppo: what the next token discounts", default=None, at_least=0)
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

    @property
    def draws(self) -> bool:
        """Whether training learns from answers that it draws itself."""
        return self.kind == "prompt" or self.learn == "gkd"


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
