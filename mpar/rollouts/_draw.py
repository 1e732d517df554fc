"""Draws the answers of one rollout: prompts to the sampler, texts to the rewards, and groups that teach nothing once more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mpar.errors import DataError, RewardError
from mpar.ops import fold_key
from mpar.rollouts._advantages import advantages, is_even
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompt, Prompts
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Drawn, Sampler
from mpar.rollouts.rewards import Reward, score

__all__ = ["Drawing", "Exchange", "Measure", "draw", "numbers_of", "with_advantages"]

Exchange = Callable[[object], list[object]]
"""A function that gives every rank what each rank has, in the order of ranks; all ranks call it together."""


Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function of the parameters, as this rank has them by path, and of a global batch, that gives numbers of its positions,
(B, S). All ranks call it together."""


@dataclass(frozen=True)
class Drawing:
    """What answers are drawn with.

    rewards: functions, which each rank calls for its own answers; `models` are called by all ranks together, for all answers.
    decode:  the text of tokens, without special ones. exchange, rank, size: how ranks share the work: each draws every `size`-th
             group, and rewards it.
    measure: gives what the task measures of answers. teacher: draws those answers that the plan leaves to the teacher.
    time_s:  how long one reward may take for the answers of a rank; None: as long as it wants to.
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
    models: Sequence[Reward] = ()
    measure: Measure | None = None
    teacher: Sampler | None = None
    time_s: float | None = None


def draw(drawing: Drawing, number: int) -> tuple[list[Rollout], str | None]:
    """The answers of rollout `number` with their rewards, group by group, and why they could not be rewarded, if so; then some
    have no rewards. The same on all ranks, which call this together.
    """
    size = drawing.plan.group_size
    groups: dict[int, list[Rollout]] = {}
    missing: Sequence[int] = range(drawing.plan.num_groups)
    for attempt in range(drawing.plan.max_redraws + 1):
        mine = missing[drawing.rank :: drawing.size]
        drawn, error = _drawn(drawing, number, mine, attempt), None
        try:
            drawn = score(drawing.rewards, drawn, drawing.time_s)
        except RewardError as problem:
            error = str(problem)
        of_mine = {slot: drawn[i * size : (i + 1) * size] for i, slot in enumerate(mine)}
        parts: list[tuple[dict[int, list[Rollout]], str | None]] = drawing.exchange((of_mine, error))  # type: ignore[assignment]
        error = next((found for _, found in parts if found is not None), None)
        found = {slot: group for part, _ in parts for slot, group in part.items()}
        if error is None and drawing.models:
            found, error = _scored_by_models(drawing, found)
        groups |= found
        missing = [slot for slot, group in sorted(found.items()) if is_even([rollout.reward for rollout in group])]
        if error is not None or not missing:
            break
    return [rollout for slot in sorted(groups) for rollout in groups[slot]], error


def _scored_by_models(drawing: Drawing, groups: Mapping[int, list[Rollout]]) -> tuple[dict[int, list[Rollout]], str | None]:
    """The groups with the rewards of models, too; and why that was not possible, if so."""
    flat = [rollout for slot in sorted(groups) for rollout in groups[slot]]
    try:
        scored = score(drawing.models, flat)
    except RewardError as problem:
        return dict(groups), str(problem)
    size = drawing.plan.group_size
    return {slot: scored[i * size : (i + 1) * size] for i, slot in enumerate(sorted(groups))}, None


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
    lengths = {
        "answer_tokens": _mean([len(rollout.answer_ids) for rollout in rollouts]),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts) / count,
    }
    if not plan.rewarded:
        return {**lengths, "on_policy": sum(rollout.writer == "policy" for rollout in rollouts) / count}
    given = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    even = [is_even([rollout.reward for rollout in rollouts[begin : begin + size]]) for begin in range(0, len(rollouts), size)]
    numbers = {
        "reward": _mean(given),
        "reward_std": math.sqrt(max(0.0, _mean([reward**2 for reward in given]) - _mean(given) ** 2)),
        **lengths,
        **({"even_groups": sum(even) / len(even)} if size > 1 else {}),
        "without_reward": (count - len(given)) / count,
    }
    for name in rollouts[0].rewards:
        numbers[f"reward/{name}"] = _mean([value for rollout in rollouts if (value := rollout.rewards[name]) is not None])
    return numbers


def _drawn(drawing: Drawing, number: int, slots: Sequence[int], attempt: int) -> list[Rollout]:
    """Answers without rewards for these slots of a rollout, all of a slot next to each other."""
    plan = drawing.plan
    prompts = [drawing.prompts.take(number * plan.num_groups + slot, attempt) for slot in slots]
    writers = [_writer(drawing, number, slot, attempt) for slot in slots]
    asks = [
        Ask(prompt.ids, _seed(drawing.seed, "rollout", number, slot, attempt), choice)
        for slot, prompt in zip(slots, prompts, strict=True)
        for choice in range(plan.group_size)
    ]
    answers = _answers(drawing, asks, prompts, writers)
    rollouts = []
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        of_group = index // plan.group_size
        prompt = prompts[of_group]
        rollouts.append(
            Rollout(
                prompt=prompt.text or drawing.decode(prompt.ids),
                prompt_ids=ask.prompt,
                name=prompt.name,
                group=number * plan.num_groups + slots[of_group],
                choice=ask.choice,
                answer=drawing.decode(answer.tokens),
                answer_ids=answer.tokens,
                logps=answer.logps,
                finish=answer.finish,
                columns=prompt.columns,
                writer=writers[of_group],
            )
        )
    return rollouts


def _writer(drawing: Drawing, number: int, slot: int, attempt: int) -> str:
    """Who answers a prompt, which depends on the seed and on nothing that was drawn."""
    share = drawing.plan.policy_share
    if share >= 1 or fold_key(drawing.seed, "writer", number, slot, attempt)[0] < share * 2**32:
        return "policy"
    return "teacher" if drawing.plan.teacher else "data"


def _answers(drawing: Drawing, asks: Sequence[Ask], prompts: Sequence[Prompt], writers: Sequence[str]) -> list[Drawn]:
    """An answer to each, by whoever writes it."""
    size, most = drawing.plan.group_size, drawing.plan.max_tokens
    writer_of = [writers[index // size] for index in range(len(asks))]
    found: dict[int, Drawn] = {}
    for writer, sampler in (("policy", drawing.sampler), ("teacher", drawing.teacher)):
        chosen = [index for index, given in enumerate(writer_of) if given == writer]
        if chosen:
            assert sampler is not None
            found |= zip(chosen, sampler.draw([asks[index] for index in chosen]), strict=True)
    for index in (index for index, given in enumerate(writer_of) if given == "data"):
        ids = prompts[index // size].answer_ids
        if not ids:
            name = prompts[index // size].name
            raise DataError(f"cannot learn from {name}: it has no answer, and the policy writes only some.")
        found[index] = Drawn(ids[:most], (), "stop" if len(ids) <= most else "length")
    return [found[index] for index in range(len(asks))]


def _seed(seed: int, purpose: str, number: int, slot: int, attempt: int) -> int:
    low, high = fold_key(seed, purpose, number, slot, attempt)
    return low | (high & 0x7FFFFFFF) << 32


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
