"""Gives rollouts their rewards: calls every function, checks what it returns, and adds the weighted numbers up."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path

from mpar.errors import ConfigError, MparError, RewardError, brief
from mpar.plug_ins import PlugIn, is_reference
from mpar.rollouts._rollout import Rollout
from mpar.rollouts.rewards._limit import Followed, OutOfTime, limited

__all__ = ["NAMES", "Reward", "RewardSpec", "make_rewards", "reward_problems", "score"]

NAMES: Mapping[str, str] = {
    "exact": "mpar.rollouts.rewards._exact:exact",
    "format": "mpar.rollouts.rewards._exact:format_matches",
    "length": "mpar.rollouts.rewards._exact:length",
    "overlong": "mpar.rollouts.rewards._exact:overlong",
    "cosine": "mpar.rollouts.rewards._shape:cosine",
    "repetition": "mpar.rollouts.rewards._shape:repetition",
    "code": "mpar.rollouts.rewards._code:code_runs",
}
"""The rewards that have names, and their functions."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward as it is asked for: its name or `module:function`, what it is multiplied by, and what it is called with."""

    name: str
    weight: float = 1.0
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether it is the folder of a reward model, and not a function."""
        return self.name not in NAMES and not is_reference(self.name) and Path(self.name).is_dir()

    @property
    def plug_in(self) -> PlugIn:
        """The function."""
        return PlugIn(f"reward_options.{self.name}", NAMES.get(self.name, self.name), self.options, positional=1)


@dataclass(frozen=True)
class Reward:
    """A function from rollouts to a number for each, or None where it has nothing to say; and what the number weighs."""

    name: str
    weight: float
    function: Callable[..., object]
    options: Mapping[str, object] = field(default_factory=dict)


def reward_problems(specs: Sequence[RewardSpec]) -> list[str]:
    """A line for each reward that cannot be called as it is asked for, and if there is none."""
    problems = [] if specs else ["there is no reward: name one, such as exact, or module:function of your own"]
    names = [spec.name for spec in specs]
    problems += [f"the reward {name} is named twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for spec in specs:
        if spec.is_folder:
            problems += [f"the reward model {spec.name} has no options"] if spec.options else []
        elif spec.name not in NAMES and not is_reference(spec.name):
            problems.append(
                f"{spec.name!r} is no reward: known are {', '.join(NAMES)}, module:function, and folders of runs with task=reward"
            )
        else:
            problems += spec.plug_in.problems()
        if not math.isfinite(spec.weight):
            problems.append(f"the weight of {spec.name} is {spec.weight}")
    return problems


def make_rewards(specs: Sequence[RewardSpec]) -> list[Reward]:
    """The functions. Raises ConfigError, listing everything that keeps them from being called."""
    problems = reward_problems(specs)
    if problems:
        raise ConfigError("cannot reward answers:\n  " + "\n  ".join(problems))
    return [Reward(spec.name, spec.weight, spec.plug_in.function(), spec.options) for spec in specs]


def score(rewards: Sequence[Reward], rollouts: Sequence[Rollout], time_s: float | None = None) -> list[Rollout]:
    """The rollouts with these rewards besides those that they have. A reward that is None or NaN is left out of the sum; a
    rollout without any has None.

    time_s: how long a function may take, see `limited`. Raises RewardError if one takes longer, raises, or returns anything else
    than a number or None for each rollout.
    """
    columns = {reward.name: _values(reward, rollouts, time_s) for reward in rewards}
    scored = []
    for index, rollout in enumerate(rollouts):
        given = {name: values[index] for name, values in columns.items()}
        parts = [reward.weight * value for reward in rewards if (value := given[reward.name]) is not None]
        parts += [] if rollout.reward is None else [rollout.reward]
        scored.append(replace(rollout, rewards={**rollout.rewards, **given}, reward=math.fsum(parts) if parts else None))
    return scored


def _values(reward: Reward, rollouts: Sequence[Rollout], time_s: float | None) -> list[float | None]:
    followed = Followed(rollouts)
    try:
        with limited(time_s):
            found = reward.function(followed, **reward.options)
            several = not isinstance(found, str | Mapping) and hasattr(found, "__iter__")
            values = list(found) if several else []  # type: ignore[call-overload]  # a generator runs only here
    except OutOfTime:
        at = "before it read one" if followed.last is None else f"the last that it read is {_described(followed.last)}"
        raise RewardError(
            f"cannot reward answers with {reward.name}: task.reward_time_s={time_s:g} seconds are over, and it has not returned "
            f"for {len(rollouts)} rollouts; {at}.\nLet it give up by itself, which None says, or allow it more time."
        ) from None
    except MparError as error:
        raise RewardError(f"cannot reward answers with {reward.name}: {error}") from error
    except (Exception, SystemExit) as error:
        at = "" if followed.last is None else f"; the last rollout that it read is {_described(followed.last)}"
        raise RewardError(f"cannot reward answers with {reward.name}: it raised {type(error).__name__}: {error}{at}") from error
    if not several:
        raise RewardError(f"cannot reward answers with {reward.name}: it returned {brief(found)}, not a number for each rollout")
    if len(values) != len(rollouts):
        raise RewardError(
            f"cannot reward answers with {reward.name}: it returned {len(values)} values for {len(rollouts)} rollouts; it must "
            "return one for each, None where it has nothing to say"
        )
    return [_value(reward, value, rollout) for value, rollout in zip(values, rollouts, strict=True)]


def _described(rollout: Rollout) -> str:
    return f"the answer {brief(rollout.answer)} to {rollout.name}"


def _value(reward: Reward, value: object, rollout: Rollout) -> float | None:
    """A number, or None for None and NaN."""
    number = _number(value)
    if value is None or (number is not None and math.isnan(number)):
        return None
    if number is None or math.isinf(number):
        raise RewardError(
            f"cannot reward answers with {reward.name}: for {_described(rollout)} it returned "
            f"{brief(value)}, which is no finite number, None or NaN"
        )
    return number


def _number(value: object) -> float | None:
    """A number of Python, NumPy or torch as a float, infinite if it is too large for one; None if it is no number."""
    try:
        single = value.item() if hasattr(value, "item") and not isinstance(value, Real) else value
        return float(single) if isinstance(single, Real) else None
    except OverflowError:
        return math.inf
    except (RuntimeError, TypeError, ValueError):  # a tensor of several numbers
        return None
