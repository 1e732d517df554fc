"""Draws the answers of one rollout: prompts to the sampler, texts to the rewards, and groups that teach nothing once more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mpar.errors import RewardError
from mpar.ops import fold_key
from mpar.rollouts._advantages import advantages, is_even
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompts
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Sampler
from mpar.rollouts.rewards import Reward, score

__all__ = ["Drawing", "Exchange", "draw", "numbers_of", "with_advantages"]

Exchange = Callable[[object], list[object]]
"""A function that gives every rank what each rank has, in the order of ranks; all ranks call it together."""


@dataclass(frozen=True)
class Drawing:
    """What answers are drawn with.

    decode:   the text of tokens, without special ones. exchange, rank, size: how ranks share the work: each draws and rewards
              every `size`-th group.
    """

    plan: RolloutPlan
    prompts: Prompts
    sampler: Sampler
    rewards: Sequence[Reward]
    decode: Callable[[Sequence[int]], str]
    seed: int
    exchange: Exchange
    rank: int = 0
    size: int = 1


def draw(drawing: Drawing, number: int) -> tuple[list[Rollout], str | None]:
    """The answers of rollout `number` with their rewards, group by group, and why they could not be rewarded, if so; then some
    have no rewards. The same on all ranks.
    """
    mine = range(drawing.rank, drawing.plan.num_groups, drawing.size)
    groups: dict[int, list[Rollout]] = {}
    error: str | None = None
    missing = list(mine)
    for attempt in range(drawing.plan.max_redraws + 1):
        drawn = _drawn(drawing, number, missing, attempt)
        try:
            scored = score(drawing.rewards, drawn)
        except RewardError as problem:
            scored, error = drawn, str(problem)
        size = drawing.plan.group_size
        found = {slot: scored[i * size : (i + 1) * size] for i, slot in enumerate(missing)}
        groups |= found
        missing = [slot for slot, group in found.items() if is_even([rollout.reward for rollout in group])]
        if error is not None or not missing:
            break
    parts: list[tuple[dict[int, list[Rollout]], str | None]] = drawing.exchange((groups, error))  # type: ignore[assignment]
    everything = {slot: group for part, _ in parts for slot, group in part.items()}
    first_error = next((found for _, found in parts if found is not None), None)
    return [rollout for slot in sorted(everything) for rollout in everything[slot]], first_error


def with_advantages(plan: RolloutPlan, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, whose rewards are known, with their advantages."""
    size = plan.group_size
    groups = [rollouts[begin : begin + size] for begin in range(0, len(rollouts), size)]
    found = advantages([[rollout.reward for rollout in group] for group in groups], plan.scale, plan.baseline)
    return [
        replace(rollout, advantage=advantage)
        for group, of_group in zip(groups, found, strict=True)
        for rollout, advantage in zip(group, of_group, strict=True)
    ]


def numbers_of(plan: RolloutPlan, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """What is worth seeing of rollouts with rewards: means of the rewards, and shares of answers and groups."""
    size, count = plan.group_size, len(rollouts)
    given = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    even = [is_even([rollout.reward for rollout in rollouts[begin : begin + size]]) for begin in range(0, len(rollouts), size)]
    numbers = {
        "reward": _mean(given),
        "reward_std": math.sqrt(max(0.0, _mean([reward**2 for reward in given]) - _mean(given) ** 2)),
        "answer_tokens": _mean([len(rollout.answer_ids) for rollout in rollouts]),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts) / count,
        "even_groups": sum(even) / len(even),
        "without_reward": (count - len(given)) / count,
    }
    for name in rollouts[0].rewards:
        numbers[f"reward/{name}"] = _mean([value for rollout in rollouts if (value := rollout.rewards[name]) is not None])
    return numbers


def _drawn(drawing: Drawing, number: int, slots: Sequence[int], attempt: int) -> list[Rollout]:
    """Answers without rewards for these slots of a rollout, all of a slot next to each other."""
    plan = drawing.plan
    prompts = [drawing.prompts.take(number * plan.num_groups + slot, attempt) for slot in slots]
    asks = [
        Ask(prompt.ids, _seed(drawing.seed, number, slot, attempt), choice)
        for slot, prompt in zip(slots, prompts, strict=True)
        for choice in range(plan.group_size)
    ]
    rollouts = []
    for index, (ask, answer) in enumerate(zip(asks, drawing.sampler.draw(asks), strict=True)):
        of_group = index // plan.group_size
        prompt = prompts[of_group]
        rollouts.append(
            Rollout(
                prompt=prompt.text,
                prompt_ids=ask.prompt,
                name=prompt.name,
                group=number * plan.num_groups + slots[of_group],
                choice=ask.choice,
                answer=drawing.decode(answer.tokens),
                answer_ids=answer.tokens,
                logps=answer.logps,
                finish=answer.finish,
                columns=prompt.columns,
            )
        )
    return rollouts


def _seed(seed: int, number: int, slot: int, attempt: int) -> int:
    low, high = fold_key(seed, "rollout", number, slot, attempt)
    return low | (high & 0x7FFFFFFF) << 32


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
