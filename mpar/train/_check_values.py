"""What is wrong with values that each have the right type and keep their bounds, but do not go together. This loads no torch."""

import re
from collections.abc import Iterator

from mpar.data import TokenWeights
from mpar.errors import ConfigError
from mpar.train._config import EvaluationConfig, ModelConfig, OptimizerConfig, TaskConfig, TrainConfig
from mpar.train._duration import deadline_after
from mpar.train._key import within_bounds
from mpar.train._learning_rate import make_learning_rate
from mpar.train._sizes import batch_size, num_microbatches, seq_len

__all__ = ["value_problems"]

_WORD_BYTES = 8
_NUM_BATCH_ENTRIES = 4  # tokens, labels, positions, documents
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KINDS = {
    "next_token": ("sft", "pt"),
    "dft": ("sft", "pt"),
    "kto": ("kto",),
    "prm": ("prm",),
    "grpo": ("prompt",),
    "ppo": ("prompt",),
    "gkd": ("sft", "prompt"),
}  # the rows that a task learns from, if not pairs
_DTYPE_BYTES = {"fp32": 4, "bf16": 2}


def value_problems(config: TrainConfig, memory_bytes: int | None = None) -> list[str]:
    """A line for everything in which values of `config` disagree, without reading a file.

    memory_bytes: that of the machine, for a batch that cannot be in it; None: the size of the batch is not looked at.
    """
    return [
        *_of_model(config.model),
        *_of_optimizer(config.optimizer),
        *_of_learning_rate(config),
        *_of_task(config),
        *_of_rollouts(config),
        *_of_token_weights(config.data.token_weights),
        *_of_evaluation(config.evaluation, draws=config.task.draws),
        *_of_stream(config),
        *_of_checkpoints(config),
        *_of_time_limit(config.time_limit),
        *([] if memory_bytes is None else _of_memory(config, max(memory_bytes, config.hardware.memory_bytes))),
    ]


def _of_model(model: ModelConfig) -> Iterator[str]:
    given = [name for name, value in (("path", model.path), ("config", model.config)) if value is not None]
    if model.plugin is not None and given:
        yield f"model.plugin={model.plugin} and model.{given[0]} are both given: choose one"
    if model.plugin is None and not given:
        yield "model.path and model.config are both missing: give one of them"
    if model.path is not None and model.config is not None:
        yield "model.path and model.config are both given: a folder has a config of its own, choose it with model=hf"


def _of_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.plugin is None and optimizer.kind is None:
        yield "optimizer.kind is missing: it is null, and there is no optimizer.plugin"
    if optimizer.plugin is not None and optimizer.kind is not None:
        yield f"optimizer.plugin={optimizer.plugin} and optimizer.kind={optimizer.kind} are both given: choose one"


def _of_learning_rate(config: TrainConfig) -> list[str]:
    if config.steps < 1 or not within_bounds(config.optimizer):
        return []  # these are reported already
    try:
        make_learning_rate(config.optimizer, config.steps)
    except ConfigError as error:
        first, *others = str(error).splitlines()
        return [f"optimizer: {line.strip()}" for line in others or [first]]
    return []


def _of_task(config: TrainConfig) -> Iterator[str]:
    task = config.task
    kinds = _KINDS.get(task.learn, ("preference",))
    if task.plugin is None and task.kind not in kinds:
        yield (
            f"task.kind={task.kind} with task.learn={task.learn}, which learns from {' or '.join(kinds)}: choose both by "
            "task=sft, pt, dft, dpo, orpo, simpo, cpo, reward, kto, prm, grpo, ppo or gkd"
        )
    needed = 2 if task.learn not in ("next_token", "dft", "prm", "grpo", "ppo", "gkd") else 1
    if task.answers < needed or task.answers % needed:
        yield f"task.answers={task.answers}: answers come in twos with task.learn={task.learn}, so it must be an even number"
    if task.reference == "columns" and config.data.stream:
        yield (
            "task.reference=columns with data.stream: log-probabilities are computed for all rows before the first step, and a "
            "stream has no end; use task.reference=frozen"
        )


def _of_rollouts(config: TrainConfig) -> Iterator[str]:
    task = config.task
    given = [name for name, default in (("lmbda", 0.5), ("seq_kd", False), ("teacher", None)) if getattr(task, name) != default]
    if task.learn != "gkd" and given:
        yield f"{', '.join(f'task.{name}' for name in given)}: only task.learn=gkd has a teacher"
    if not task.draws:
        return
    if task.learn == "gkd":
        yield from _of_teacher(task, rewarded=config.evaluation.has_data)
    elif not task.rewards:
        yield "task.rewards is empty: name what answers are worth, such as [exact], or module:function of your own"
    if task.reward_weights is not None and len(task.reward_weights) != len(task.rewards):
        yield f"task.reward_weights has {len(task.reward_weights)} numbers for {len(task.rewards)} rewards"
    unknown = [name for name in task.reward_options if name not in task.rewards]
    if unknown:
        yield f"task.reward_options is for {', '.join(unknown)}, which task.rewards={list(task.rewards)} does not have"
    turns = [name for name in ("max_turns", "max_turn_tokens", "environment_options") if getattr(task, name)]
    if task.environment is None and turns:
        yield f"{', '.join(f'task.{name}' for name in turns)}: only a conversation with task.environment has several turns"
    if task.environment is not None and task.learn == "gkd":
        yield "task.environment: task.learn=gkd learns from single answers; use task=grpo or ppo"
    if task.reward_time_s >= config.timeout_s and task.rewards:
        yield (
            f"task.reward_time_s={task.reward_time_s:g} is not below timeout_s={config.timeout_s:g}: the other ranks would give "
            "up before a reward that takes too long is named"
        )
    rates = {"model": config.model.dropout, "adapter": config.adapter.dropout}
    yield from (
        f"{name}.dropout={rate}: answers are drawn without dropout, so that an update would meet other probabilities than those "
        "with which they were drawn; use 0"
        for name, rate in rates.items()
        if rate
    )
    if config.data.stream:
        yield "data.stream=true: prompts are drawn in an order of their own, and are kept in memory"


def _of_teacher(task: TaskConfig, *, rewarded: bool) -> Iterator[str]:
    if task.teacher is None:
        yield "task.teacher is missing: task.learn=gkd needs a Hugging Face folder, or a run with one, of the same vocabulary"
    if task.rewards and not rewarded:
        yield (
            "task.rewards: task.learn=gkd learns from every answer, whatever it is worth; answers to held-out prompts can be "
            "rewarded: give evaluation.fraction or evaluation.sources"
        )
    if task.kind == "prompt" and task.lmbda < 1 and not task.seq_kd:
        yield f"task.kind=prompt with task.lmbda={task.lmbda:g}: prompts have no answers; use kind=sft, lmbda=1 or seq_kd=true"
    if task.seq_kd and task.lmbda == 1:
        yield "task.seq_kd=true with task.lmbda=1: the model draws all answers itself, so the teacher draws none"


def _of_token_weights(given: str) -> list[str]:
    try:
        TokenWeights.parse(given)
    except ConfigError as error:
        return [f"data.token_weights={error}"]
    return []


def _of_evaluation(evaluation: EvaluationConfig, *, draws: bool) -> Iterator[str]:
    if evaluation.answers is not None and not draws:
        yield f"evaluation.answers={evaluation.answers}: only tasks that draw answers answer what they are evaluated on"
    named = isinstance(evaluation.sources, dict)
    wrong = [name for name in evaluation.sets if not re.fullmatch(r"[\w.-]+", str(name))] if named else []
    if named and not evaluation.sources:
        yield "evaluation.sources={} names no set"
    if wrong:
        yield f"evaluation.sources names {', '.join(map(repr, wrong))}: a name has letters, digits, '.', '-' and '_'"
    if evaluation.fraction is not None and "held_out" in evaluation.sets:
        yield "evaluation.sources names 'held_out', which is what evaluation.fraction is called: choose another name"
    if evaluation.every is not None and not evaluation.has_data:
        yield (
            f"evaluation.every={evaluation.every} has no data: give evaluation.fraction (such as 0.1, the share of data.sources "
            "that is held out) or evaluation.sources"
        )


def _of_stream(config: TrainConfig) -> Iterator[str]:
    if config.data.stream and config.evaluation.fraction is not None and config.evaluation.batches is None:
        yield (
            "evaluation.fraction with data.stream: a stream has no end, so evaluation.batches must say how many batches each "
            "evaluation reads"
        )


def _of_checkpoints(config: TrainConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if config.restarts and not config.checkpoint.optimizer_state:
        yield (
            f"restarts={config.restarts} with checkpoint.optimizer_state=false: a restart goes on from the newest checkpoint, "
            "which would lack the state of the optimizer"
        )
    if config.checkpoint.keep_best is not None and config.task.draws:
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} goes by the loss of evaluations, and task.learn="
            f"{config.task.learn} has none: use checkpoint.keep_every"
        )
    elif config.checkpoint.keep_best is not None and not evaluation.has_data:
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} has no loss to go by: give evaluation.fraction or "
            "evaluation.sources, and evaluation.every"
        )


def _of_time_limit(limit: str | float | None) -> list[str]:
    try:
        deadline_after(limit)
    except ConfigError as error:
        return [f"time_limit: {error}"]
    return []


def _of_memory(config: TrainConfig, memory_bytes: int) -> Iterator[str]:
    """A line if a batch cannot be in memory, by what is surely needed: its own entries, and one activation of a microbatch."""
    mesh = config.mesh
    if not within_bounds(mesh, config.schedule, config.data, config.model):
        return
    positions = batch_size(config) * seq_len(config) // (mesh.dp * mesh.fsdp * mesh.cp)
    at_once = positions // (num_microbatches(config) * config.schedule.num_slices * mesh.tp)
    sizes = [config.model.config[name] for name in _HIDDEN if name in config.model.config] if config.model.config else []
    hidden = sizes[0] if sizes and isinstance(sizes[0], int) else 1
    batch_bytes = positions * _NUM_BATCH_ENTRIES * _WORD_BYTES
    activation_bytes = at_once * hidden * _DTYPE_BYTES[config.precision.name]
    if batch_bytes + activation_bytes > memory_bytes:
        yield (
            f"data.batch_size={batch_size(config)} of {seq_len(config)} positions: one rank needs {batch_bytes / 2**30:,.1f} GiB "
            f"for the tokens of a batch and {activation_bytes / 2**30:,.1f} GiB for each activation of a microbatch, and there "
            f"are {memory_bytes / 2**30:,.1f} GiB of memory; use a smaller batch, more microbatches, or more ranks of dp or fsdp"
        )
