"""Tasks of a configuration: `task.learn` and its options as a `mpar.tasks.Task`, and what its batches say of answers."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from mpar.data import Answers
from mpar.errors import ConfigError
from mpar.tasks import Cpo, Dft, Dpo, Gkd, Grpo, Kto, Orpo, Ppo, Prm, Reward, Task
from mpar.train._config import TaskConfig

__all__ = ["OPTIONS", "answers_of", "make_task"]

OPTIONS = (
    *("loss", "beta", "reference", "label_smoothing", "rpo_alpha", "ld_alpha", "divergence", "divergence_alpha", "gamma"),
    *("cpo_alpha", "prompt", "desirable_weight", "undesirable_weight", "margin", "centre"),
    *("ratio", "epsilon", "epsilon_high", "delta", "weigh_kl", "bar", "value_clip", "value_weight", "lam", "temperature"),
)
"""The keys of the group `task` that are options of what is learned. One that is null has the value that the task gives it."""
_KINDS: Mapping[str, Callable[..., Task]] = {
    "dpo": Dpo,
    "kto": Kto,
    "orpo": Orpo,
    "cpo": Cpo,
    "reward": Reward,
    "prm": Prm,
    "dft": Dft,
    "grpo": Grpo,
    "ppo": Ppo,
    "gkd": Gkd,
}
_KEYS = {"losses": "loss", "loss_type": "loss", "clip": "epsilon"}


def make_task(config: TaskConfig) -> Task | None:
    """What is learned besides the next token, if anything. Raises ConfigError with options that the task does not have."""
    if config.learn == "next_token":
        given = _given(config)
        if given:
            raise ConfigError(
                f"cannot use {', '.join(f'task.{name}' for name in given)}: task.learn is next_token, which has no options.\n"
                "Choose what is learned from answers, such as task=dpo."
            )
        return None
    kind: Any = _KINDS[config.learn]
    known = [_key_of(item.name) for item in fields(kind)]
    given = _given(config)
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(
            f"cannot use {', '.join(f'task.{name}={given[name]}' for name in wrong)}: task.learn={config.learn} has the options "
            f"{', '.join(known) or 'none'}."
        )
    return kind(**_arguments(config, kind, given))


def _key_of(field: str) -> str:
    """The key of the group `task` for a field of a task."""
    return _KEYS.get(field, field)


def _given(config: TaskConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in OPTIONS if getattr(config, name) is not None}


def _arguments(config: TaskConfig, kind: type, given: Mapping[str, object]) -> dict[str, object]:
    """The options in the words of the task."""
    names = {_key_of(item.name): item.name for item in fields(kind)}
    arguments = {names[name]: value for name, value in given.items()}
    if "losses" in arguments:
        losses = arguments["losses"]
        arguments["losses"] = tuple(losses.items()) if isinstance(losses, dict) else ((losses, 1.0),)
    elif "loss_type" in arguments:
        known = get_args(get_type_hints(kind)["loss_type"])
        if arguments["loss_type"] not in known:
            raise ConfigError(f"cannot use task.loss={arguments['loss_type']}: there are {', '.join(known)}.")
    if kind is Grpo:
        arguments["max_tokens"] = config.max_new_tokens
    if arguments.get("reference") in ("frozen", "adapter"):
        arguments["reference"] = "model"
    return arguments


def answers_of(config: TaskConfig) -> Answers | None:
    """What batches say of answers; None if the task reads documents alone."""
    task = make_task(config) if config.plugin is None else None
    if task is None or not task.entries or config.draws:
        return None
    return Answers(
        config.answers,
        tuple(task.entries),
        prompts=task.reads_prompts,
        scored=not task.reads_logits,
        mismatched=isinstance(task, Kto),
    )
