"""Makes what a configuration names: mesh, strategy, model, hardware, kernels, optimizer. Needs no compiler, processes or data."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from mpar import models, tree
from mpar.arrange import arrange
from mpar.chain import Chain, check_chain
from mpar.data import BatchShape, TokenWeights
from mpar.errors import ConfigError, UnknownNameError
from mpar.kernels import Kernels, kernels_for
from mpar.mesh import Mesh
from mpar.models import DRAW, QUANTISATION, ModelOptions, Trainable
from mpar.optim import SGD, SOAP, AdamW, Lion, Muon, Optimizer, check_optimizer
from mpar.program import Hardware, check_inductor
from mpar.rollouts import RewardSpec, RolloutPlan, TokenAdvantages
from mpar.strategy import Strategy, preset
from mpar.tasks import BY_ANSWER, Ppo, TaskChain
from mpar.train._adapters import adapted, adapted_part, with_rates, without_adapters
from mpar.train._config import (
    FreezeConfig,
    HardwareConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    StrategyConfig,
    TaskConfig,
    TrainConfig,
)
from mpar.train._learning_rate import make_learning_rate
from mpar.train._plug_ins import plug_in_of
from mpar.train._quantised import quantised
from mpar.train._sizes import batch_size, seq_len
from mpar.train._tasks import make_task

__all__ = [
    "RunSetup",
    "batch_shapes",
    "chain_of",
    "check_device",
    "make_hardware",
    "make_mesh",
    "make_optimizer",
    "make_setup",
    "make_strategy",
    "model_of",
    "num_threads",
    "run_optimizer",
    "teacher_folder",
    "teacher_of",
    "trained_model",
]

BATCH_KEYS = ("tokens", "labels", "positions", "documents")
WEIGHT_KEYS = ("token_weights", "next_token_weights")  # of labels, and of those behind them


@dataclass(frozen=True)
class RunSetup:
    """A configuration and the objects that it names. Every process makes this once and passes it to what needs it.

    chain: what is trained, which is the model itself unless some of it is frozen, or a task makes another chain of it.
    """

    config: TrainConfig
    mesh: Mesh
    strategy: Strategy
    model: Trainable
    chain: Chain
    hardware: Hardware
    kernels: Kernels

    @property
    def counted(self) -> Trainable:
        """What FLOPs are counted of: what is trained, or the model, where a chain does not say what it multiplies."""
        return self.chain if isinstance(self.chain, Trainable) else self.model


def make_setup(config: TrainConfig) -> RunSetup:
    """The objects that `config` names. Of files, only the config.json of the model may be read.

    Raises an MparError if mesh, strategy, model or kernels are impossible.
    """
    mesh, strategy = make_mesh(config.mesh), make_strategy(config.strategy, config.mesh)
    model = quantised(config.model, adapted(config.adapter, _model(config.model, mesh, strategy)))
    chain = chain_of(config, _frozen(config.freeze, model))
    return RunSetup(config, mesh, strategy, model, chain, make_hardware(config.hardware), _kernels(config))


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of the configuration, its axes outermost first."""
    return Mesh(**asdict(config))


def make_strategy(config: StrategyConfig, mesh: MeshConfig) -> Strategy:
    """The preset, changed as configured. Raises ConfigError or UnknownNameError for values that no mesh could use."""
    asked = {name: value for name, value in asdict(config).items() if name != "name" and value is not None}
    axes = [axis for axis in asdict(mesh) if axis != "pp"]
    unknown = [axis for axis in asked.get("expert_axes", ()) if axis not in axes]
    if unknown:
        raise UnknownNameError(f"strategy.expert_axes={list(asked['expert_axes'])} has {unknown}: experts can be over {axes}")
    small = [f"strategy.{name}={asked[name]}" for name in ("expert_parallel", "ulysses_size") if asked.get(name, 1) < 1]
    if small:
        raise ConfigError(f"cannot use {', '.join(small)}: a number of ranks is at least 1")
    return replace(preset(config.name), **asked)


def _model(group: ModelConfig, mesh: Mesh, strategy: Strategy) -> Trainable:
    """The model, with master parameters in float32. Raises ConfigError or CheckpointError.

    `model.router.group=rank` is replaced by `token_groups`: one group for each part of a microbatch that different ranks have in
    layers of experts.
    """
    router = dict(group.router or {})
    if "group" not in router:
        return _model_of(group, group.router)
    asked = router.pop("group")
    if asked != "rank" or "token_groups" in router:
        raise ConfigError(
            f"cannot build the model: model.router.group={asked} is not `rank`, or model.router.token_groups is "
            "given, too.\nUse group=rank, for one group of tokens on each rank, or token_groups."
        )
    plain = _model_of(group, router)
    strategy, mesh = arrange(strategy, mesh, plain.abstract_params, plain.param_axes)
    groups = tuple(mesh.axis_size(strategy.compute[row]) for row in ("moe_batch", "moe_seq"))
    return plain if groups == (1, 1) else _model_of(group, {**router, "token_groups": groups})


def trained_model(config: TrainConfig) -> Trainable:
    """The model of a run with its adapters, perhaps quantised, on a mesh that does not divide the tokens of its routers."""
    return quantised(config.model, adapted(config.adapter, model_of(config.model)))


def model_of(group: ModelConfig) -> Trainable:
    """The model of `group` on a mesh that does not divide the tokens of its routers: what it computes without a mesh."""
    router = group.router and {name: value for name, value in group.router.items() if name != "group"}
    return _model_of(group, router)


def _model_of(group: ModelConfig, router: Mapping[str, object] | None) -> Trainable:
    plug_in = plug_in_of(group)
    if plug_in is not None:
        model = plug_in.call()
        if not isinstance(model, Trainable):
            raise ConfigError(
                f"{plug_in.label} returned {_a(model)}, not a model: return a mpar.models.Trainable, which is a chain with a "
                "vocabulary, or what models.from_config returns."
            )
        check_chain(model)
        return model
    if (group.path is None) == (group.config is None):
        raise ConfigError(
            "cannot build the model: model.path and model.config are "
            + ("both missing; give one of them" if group.path is None else "both given; choose model=hf for a folder")
        )
    source = group.path if group.path is not None else group.config
    assert source is not None
    options = ModelOptions(
        dtype=torch.float32,
        ignore=group.ignore if group.quantise is None else (*group.ignore, QUANTISATION),
        vocab_multiple=group.vocab_multiple,
        logits_chunk=group.logits_chunk,
        mlp_chunk=group.mlp_chunk,
        router=router,
        mtp_loss_weight=group.mtp_loss_weight,
        dropout=group.dropout,
    )
    return models.from_config(source, options)


def _frozen(group: FreezeConfig, model: Trainable) -> Trainable:
    """The model, of which training does not change what `group` says. Raises ConfigError or UnknownNameError."""
    return models.freeze(model, names=group.names, segments=group.segments, ratio=group.ratio, trainable=group.trainable)


def chain_of(config: TrainConfig, model: Trainable) -> Chain:
    """What is trained: `model`, or what a task makes of it. Raises ConfigError if options of the task are impossible, or if what
    a task of the user's own makes is no chain with the parameters of the model, or one that trains what is frozen in the model.
    """
    plug_in = plug_in_of(config.task)
    if plug_in is None:
        task = make_task(config.task)
        if task is None:
            return model
        compared = (
            (teacher_of(config), False) if config.task.learn == "gkd" else _reference(config.task, model) if task.compares else ()
        )
        chain: Chain = TaskChain(model, task, *compared)
        check_chain(chain, trains=True)
        return chain
    made = plug_in.call(model)
    if isinstance(made, type) or not hasattr(made, "segments"):
        raise ConfigError(
            f"{plug_in.label} returned {_a(made)}, not a chain: it is given the model, and returns a mpar.chain.Chain."
        )
    chain = cast(Chain, made)
    check_chain(chain, trains=True)
    before, after = (_shapes(item) for item in (model, chain))
    if before != after:
        changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        lines = "\n  ".join(f"{path}: {before.get(path, 'none')} -> {after.get(path, 'none')}" for path in changed[:10])
        raise ConfigError(
            f"{plug_in.label} returned a chain with other parameters than the model (model -> chain):\n  {lines}\n"
            "A task changes the loss. A chain with parameters of its own is a model: model=module:function."
        )
    if unfrozen := sorted(model.frozen - chain.frozen):
        raise ConfigError(
            f"{plug_in.label} returned a chain that trains {len(unfrozen)} parameters which are frozen in the model: "
            f"{', '.join(unfrozen[:4])}\nIts `frozen` must have those of the model that it is given."
        )
    return chain


def teacher_of(config: TrainConfig) -> Trainable:
    """The model that is learned from, with parameters in the dtype of the run. Raises ConfigError or CheckpointError."""
    group = config.model
    like = replace(group, path=teacher_folder(config.task), config=None, plugin=None, quantise=None, mtp_loss_weight=None)
    return model_of(replace(like, dropout=None))


def teacher_folder(task: TaskConfig) -> str:
    """The Hugging Face folder of the teacher: `task.teacher`, or in that folder the one that a run has written."""
    assert task.teacher is not None
    return next(
        (str(folder) for folder in (Path(task.teacher), Path(task.teacher) / "hf") if (folder / "config.json").is_file()),
        task.teacher,
    )


def _reference(config: TaskConfig, model: Trainable) -> tuple[Trainable, bool]:
    """The model that is compared with in the same program, and whether it reads the parameters of `model`. Raises ConfigError."""
    adapted = adapted_part(model)
    if config.reference == "adapter" and adapted is None:
        raise ConfigError("cannot use task.reference=adapter: there is no adapter. Use task.reference=frozen or columns.")
    if config.reference == "frozen" and adapted is not None:
        raise ConfigError(
            "cannot use task.reference=frozen with an adapter, without which the model is what it was: use "
            "task.reference=adapter, or columns, if training begins with an adapter that was trained before."
        )
    if adapted is not None and any(lora.init in ("pissa", "olora") for _, lora in adapted.adapters):
        raise ConfigError(
            "cannot compare with the model without its adapter: adapter.init=pissa and olora take the adapter out of the "
            "weights, which are then no longer those of the model.\nUse task.reference=columns, or another init."
        )
    return (model, False) if adapted is None else (without_adapters(model), True)


def _shapes(chain: Chain) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in tree.leaves_with_path(chain.abstract_params)}


def _a(value: object) -> str:
    return (
        "nothing" if value is None else f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    )


def num_threads(config: TrainConfig, local_ranks: int) -> int:
    """CPU threads of one rank: as configured, or the cores of this machine divided by its ranks, at least 1."""
    return config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_ranks)


def batch_shapes(
    config: TrainConfig, chain: Chain, model: Trainable, *, training: bool = True
) -> Mapping[str, tuple[tuple[int, int], torch.dtype]]:
    """The shape and dtype of every entry of a global batch that `chain`, made of `model`, reads, in training or in an evaluation.

    Raises ConfigError if tokens have weights and the chain reads none.
    """
    read = (*BATCH_KEYS, *model.next_keys, *(DRAW,) * training)
    keys = [key for key in read if key in chain.batch_axes]
    shape = (batch_size(config), seq_len(config))
    ints: dict[str, tuple[tuple[int, int], torch.dtype]] = dict.fromkeys(keys, (shape, torch.int64))
    if isinstance(chain, TaskChain):
        columns = (shape[0], answers_per_row(config))
        own = {key: (columns if entry.axes == BY_ANSWER else shape, entry.dtype) for key, entry in chain.task.entries.items()}
        if own:
            return {**ints, **own}
    if TokenWeights.parse(config.data.token_weights).binary:
        return ints
    if WEIGHT_KEYS[0] not in chain.batch_axes:
        raise ConfigError(
            f"cannot train with data.token_weights={config.data.token_weights}: the chain {type(chain).__name__} reads no "
            f"{WEIGHT_KEYS[0]}.\nLet its batch_axes have them and its loss use them, or choose weights of 0 and 1."
        )
    floats = [key for key in (WEIGHT_KEYS if model.next_keys else WEIGHT_KEYS[:1]) if key in chain.batch_axes]
    return {**ints, **dict.fromkeys(floats, (shape, torch.float32))}


def answers_per_row(config: TrainConfig) -> int:
    """How many answers a row of a batch may have."""
    return rollout_plan(config).answers_per_row if config.task.draws else config.task.answers


def rollout_plan(config: TrainConfig) -> RolloutPlan:
    """How answers are drawn. Raises ConfigError with all sizes that do not fit each other."""
    task, length = config.task, seq_len(config)
    return RolloutPlan(
        shape=BatchShape(batch_size(config), length),
        group_size=task.group_size,
        max_prompt_tokens=task.max_prompt_tokens or max(2, length - task.max_new_tokens + 1),
        max_tokens=task.max_new_tokens,
        num_batches=task.rollout_batches,
        num_rounds=task.rollout_rounds,
        scale=task.scale_rewards,
        baseline=task.baseline,
        max_redraws=task.max_redraws,
        drop_truncated=task.drop_truncated,
        by_token=_by_token(task),
        rewarded=task.learn != "gkd",
        policy_share=task.lmbda if task.learn == "gkd" else 1.0,
        teacher=task.seq_kd,
        max_turns=task.max_turns,
        max_turn_tokens=task.max_turn_tokens,
    )


def _by_token(task: TaskConfig) -> TokenAdvantages | None:
    made = make_task(task) if task.learn == "ppo" else None
    return TokenAdvantages(made.beta, made.gamma, made.lam) if isinstance(made, Ppo) else None


def reward_specs(task: TaskConfig) -> list[RewardSpec]:
    """The rewards that the configuration names."""
    weights = task.reward_weights or (1.0,) * len(task.rewards)
    return [
        RewardSpec(name, weight, task.reward_options.get(name, {})) for name, weight in zip(task.rewards, weights, strict=True)
    ]


def run_optimizer(config: TrainConfig, steps: int) -> Optimizer:
    """The optimizer of a run of `steps` updates, with the rates of its adapters. Raises ConfigError."""
    return with_rates(config.adapter, make_optimizer(config.optimizer, steps))


def make_optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    """The optimizer, with its learning rate for a run of `steps` updates. Raises ConfigError."""
    rate = make_learning_rate(config, steps)
    plug_in = plug_in_of(config)
    if plug_in is not None:
        made = plug_in.call(lr=rate)
        check_optimizer(made)
        return cast(Optimizer, made)
    if config.kind == "sgd":
        return SGD(lr=rate, momentum=config.momentum, weight_decay=config.weight_decay, clip_norm=config.clip_norm)
    if config.kind == "lion":
        return Lion(lr=rate, betas=config.betas, weight_decay=config.weight_decay, clip_norm=config.clip_norm)
    if config.kind == "muon":
        return Muon(
            lr=rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            adjust_lr=config.adjust_lr,
            num_rounds=config.num_rounds,
            betas=config.betas,
            eps=config.eps,
            clip_norm=config.clip_norm,
        )
    if config.kind == "soap":
        return SOAP(
            lr=rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            precondition_frequency=config.precondition_frequency,
            clip_norm=config.clip_norm,
        )
    return AdamW(lr=rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, clip_norm=config.clip_norm)


def check_device(config: TrainConfig) -> None:
    """Raise ConfigError unless this node has the devices that the configuration asks for, and they can run `execution`."""
    if config.execution == "cuda_graph" and (config.device != "cuda" or make_mesh(config.mesh).size > 1):
        raise ConfigError(
            f"cannot train with execution=cuda_graph on device={config.device} and {make_mesh(config.mesh)}: a step is recorded "
            "on one GPU. Use execution=eager or inductor, or device=cuda mesh=one."
        )
    if config.execution == "inductor":
        check_inductor(config.device)
    if config.device != "cuda":
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE", make_mesh(config.mesh).size))  # torchrun sets it on every node
    if torch.cuda.device_count() < local:
        raise ConfigError(
            f"cannot train with device=cuda: {local} ranks run on this machine, and torch finds {torch.cuda.device_count()} CUDA "
            "devices. Use a smaller mesh, more nodes under torchrun, or device=cpu."
        )


def _kernels(config: TrainConfig) -> Kernels:
    """How kernels are chosen: for the GPU of this machine if the run uses one, else for the chip of the hardware profile."""
    if config.device == "cuda" and torch.cuda.is_available():
        return kernels_for(config.kernels, "cuda")
    return Kernels(config.kernels, config.hardware.arch)


def make_hardware(config: HardwareConfig) -> Hardware:
    """The hardware profile, from which times are predicted."""
    return Hardware(**asdict(config))
