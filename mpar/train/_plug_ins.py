"""The plug-ins of a configuration: `model=`, `optimizer=`, `task=` and `schedule=` may name `module:function`. Loads no torch."""

from dataclasses import fields

from mpar.plain_value import PlainValue
from mpar.plug_ins import PlugIn, is_reference
from mpar.train._config import ModelConfig, OptimizerConfig, PlainConfig, ScheduleConfig, TaskConfig, TrainConfig
from mpar.train._rollout_keys import RolloutKeys

__all__ = ["PLUGGABLE", "RATE_KEYS", "environment_of", "plug_in_of", "plug_ins", "values_of_reference", "with_options"]

RATE_KEYS = ("lr", "lr_decay", "warmup_steps", "warmup_ratio", "min_lr", "min_ratio", "decay_ratio")
_SIZES = ("rank", "num_ranks", "num_chunks", "num_microbatches")
_KEYS = {
    "model": ("name", "seq_len"),
    "optimizer": ("kind", *RATE_KEYS),
    "task": ("kind", "chat", "max_new_tokens", *(item.name for item in fields(RolloutKeys))),
    "schedule": (
        "name", "num_microbatches", "num_slices", "paired", "num_chunks", "layout", "bucket_bytes", "prefetch_bytes", "table",
    ),
}  # fmt: skip
"""By group, the keys that mean the same with a plug-in. All others are parameters of the plug-in."""
PLUGGABLE = tuple(_KEYS)


def plug_in_of(config: ModelConfig | OptimizerConfig | TaskConfig | ScheduleConfig) -> PlugIn | None:
    """The plug-in that a group names, if it names one."""
    if config.plugin is None:
        return None
    if isinstance(config, ModelConfig):
        return PlugIn("model", config.plugin, config.options)
    if isinstance(config, OptimizerConfig):
        return PlugIn("optimizer", config.plugin, config.options, given=("lr",))
    if isinstance(config, TaskConfig):
        return PlugIn("task", config.plugin, config.options, positional=1)
    return PlugIn("schedule", config.plugin, config.options, given=("num_ranks", "num_microbatches"), optional=_SIZES)


def plug_ins(config: TrainConfig) -> list[PlugIn]:
    """Every plug-in of a configuration."""
    found = [plug_in_of(group) for group in (config.model, config.optimizer, config.task, config.schedule)]
    found.append(environment_of(config.task))
    return [*(plug_in for plug_in in found if plug_in is not None), *_rewards(config.task)]


def _rewards(task: TaskConfig) -> list[PlugIn]:
    """The rewards that are functions of the user's own."""
    names = task.rewards if task.draws else ()
    return [PlugIn("reward", name, task.reward_options.get(name, {}), positional=1) for name in names if is_reference(name)]


def environment_of(task: TaskConfig) -> PlugIn | None:
    """The environment of the conversations that the run draws, if there is one."""
    if task.environment is None or not task.draws:
        return None
    keys = "task.environment_options"
    return PlugIn("task.environment", task.environment, task.environment_options, positional=1, option_keys=keys)


def values_of_reference(group: str, reference: str) -> PlainConfig:
    """The values that `group=module:attribute` stands for, besides which the plug-in's own parameters may be given."""
    values: dict[str, PlainConfig] = {
        "model": {"name": reference.replace(":", "."), "seq_len": 256},
        "optimizer": {"kind": None, "lr": "???", "lr_decay": "cosine", "warmup_ratio": 0.05, "min_ratio": 0.1},
        "task": {"kind": "pt"},
        "schedule": {},
    }
    return {"plugin": reference, **values[group]}


def with_options(plain: PlainConfig) -> PlainConfig:
    """A composed configuration in which the keys of a group that are a plug-in's own parameters are in its `options`."""
    return plain | {name: _with_options(name, plain[name]) for name in PLUGGABLE if name in plain}


def _with_options(name: str, group: PlainValue) -> PlainValue:
    if not isinstance(group, dict) or group.get("plugin") is None:
        return group
    kept = {key: value for key, value in group.items() if key in ("plugin", *_KEYS[name])}
    given = group.get("options")
    moved = {key: value for key, value in group.items() if key not in kept and key != "options"}
    return {**kept, "options": {**(given if isinstance(given, dict) else {}), **moved}}
