"""Draws the answers of one rollout: prompts to the sampler, texts to the rewards, and groups that teach nothing once more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mpar.errors import RewardError
from mpar.ops import fold_key
from mpar.rollouts._advantages import advantages, is_even
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompt, Prompts
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Drawn, Sampler
from mpar.rollouts.rewards import Reward, score

__all__ = [
    "Drawing",
    "Exchange",
    "Measure",
    "Question",
    "answer_numbers",
    "answered",
    "draw",
    "draw_seed",
    "numbers_of",
    "with_advantages",
]

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


@dataclass(frozen=True)
class Question:
    """A prompt that a group of answers is drawn for. group: its number in the run. seed: of the draws. writer: who answers."""

    prompt: Prompt
    group: int
    seed: int
    writer: str = "policy"


def draw(drawing: Drawing, number: int) -> tuple[list[Rollout], str | None]:
    """The answers of rollout `number` with their rewards, group by group, and why they could not be rewarded, if so; then some
    have no rewards. The same on all ranks, which call this together.
    """
    groups: dict[int, list[Rollout]] = {}
    missing: Sequence[int] = range(drawing.plan.num_groups)
    error = None
    for attempt in range(drawing.plan.max_redraws + 1):
        questions = [_question(drawing, number, slot, attempt) for slot in missing]
        answers, error = answered(drawing, questions, drawing.plan.group_size)
        found = {missing[index]: group for index, group in answers.items()}
        groups |= found
        missing = [slot for slot, group in sorted(found.items()) if is_even([rollout.reward for rollout in group])]
        if error is not None or not missing:
            break
    return [rollout for slot in sorted(groups) for rollout in groups[slot]], error


def answered(
    drawing: Drawing, questions: Sequence[Question], size: int, *, greedy: bool = False
) -> tuple[dict[int, list[Rollout]], str | None]:
    """`size` answers with their rewards to each question, by its index, and why they could not be rewarded, if so.

    greedy: each token is the likeliest one. Every rank draws and rewards some of the questions, and all have all answers, or the
    reason why a rank could not give its own.
    """
    mine = range(drawing.rank, len(questions), drawing.size)
    drawn, error = _drawn(drawing, [questions[index] for index in mine], size, greedy), None
    try:
        drawn = score(drawing.rewards, drawn, drawing.time_s)
    except RewardError as problem:
        error = str(problem)
    of_mine = {index: drawn[i * size : (i + 1) * size] for i, index in enumerate(mine)}
    parts: list[tuple[dict[int, list[Rollout]], str | None]] = drawing.exchange((of_mine, error))  # type: ignore[assignment]
    error = next((found for _, found in parts if found is not None), None)
    groups = {index: group for part, _ in parts for index, group in part.items()}
    if error is None and drawing.models:
        return _scored_by_models(drawing, groups, size)
    return groups, error


def _scored_by_models(
    drawing: Drawing, groups: Mapping[int, list[Rollout]], size: int
) -> tuple[dict[int, list[Rollout]], str | None]:
    """The groups with the rewards of models, too; and why that was not possible, if so."""
    flat = [rollout for slot in sorted(groups) for rollout in groups[slot]]
    try:
        scored = score(drawing.models, flat)
    except RewardError as problem:
        return dict(groups), str(problem)
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
    """What is worth seeing of rollouts: means of the rewards, if there are any, and shares of answers and groups."""
    size, count = plan.group_size, len(rollouts)
    if plan.rewarded:
        even = [is_even([rollout.reward for rollout in rollouts[begin : begin + size]]) for begin in range(0, count, size)]
        return {**answer_numbers(rollouts), **({"even_groups": sum(even) / len(even)} if size > 1 else {})}
    return {**answer_numbers(rollouts), "on_policy": sum(rollout.writer == "policy" for rollout in rollouts) / count}


def answer_numbers(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of answers: means of their rewards and lengths, and the shares of those without an end or a reward."""
    count = len(rollouts)
    lengths = {
        "answer_tokens": _mean([len(rollout.answer_ids) for rollout in rollouts]),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts) / count,
    }
    if not rollouts[0].rewards:
        return lengths
    given = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    numbers = {
        "reward": _mean(given),
        "reward_std": math.sqrt(max(0.0, _mean([reward**2 for reward in given]) - _mean(given) ** 2)),
        **lengths,
        "without_reward": (count - len(given)) / count,
    }
    for name in rollouts[0].rewards:
        numbers[f"reward/{name}"] = _mean([value for rollout in rollouts if (value := rollout.rewards[name]) is not None])
    return numbers


def _question(drawing: Drawing, number: int, slot: int, attempt: int) -> Question:
    """What is asked in a slot of a rollout."""
    group = number * drawing.plan.num_groups + slot
    seed = draw_seed(drawing.seed, "rollout", number, slot, attempt)
    return Question(drawing.prompts.take(group, attempt), group, seed, _writer(drawing, number, slot, attempt))


def _drawn(drawing: Drawing, questions: Sequence[Question], size: int, greedy: bool) -> list[Rollout]:
    """`size` answers without rewards to each question, all of a question next to each other."""
    asked = [question for question in questions for _ in range(size)]
    asks = [Ask(question.prompt.ids, question.seed, i % size, greedy) for i, question in enumerate(asked)]
    return [
        Rollout(
            prompt=question.prompt.text or drawing.decode(question.prompt.ids),
            prompt_ids=ask.prompt,
            name=question.prompt.name,
            group=question.group,
            choice=ask.choice,
            answer=drawing.decode(answer.tokens),
            answer_ids=answer.tokens,
            logps=answer.logps,
            finish=answer.finish,
            columns=_columns(drawing, question.prompt),
            writer=question.writer,
        )
        for question, ask, answer in zip(asked, asks, _answers(drawing, asked, asks), strict=True)
    ]


def _columns(drawing: Drawing, prompt: Prompt) -> Mapping[str, object]:
    """What a row has besides its question. Of a conversation that is its last answer, as the column `answer`."""
    return {"answer": drawing.decode(prompt.answer_ids), **prompt.columns} if prompt.answer_ids else prompt.columns


def _writer(drawing: Drawing, number: int, slot: int, attempt: int) -> str:
    """Who answers a prompt, which depends on the seed and on nothing that was drawn."""
    share = drawing.plan.policy_share
    if share >= 1 or fold_key(drawing.seed, "writer", number, slot, attempt)[0] < share * 2**32:
        return "policy"
    return "teacher" if drawing.plan.teacher else "data"


def _answers(drawing: Drawing, questions: Sequence[Question], asks: Sequence[Ask]) -> list[Drawn]:
    """An answer to each, by whoever writes it."""
    most, found = drawing.plan.max_tokens, dict[int, Drawn]()
    for writer, sampler in (("policy", drawing.sampler), ("teacher", drawing.teacher)):
        chosen = [index for index, question in enumerate(questions) if question.writer == writer]
        if chosen:
            assert sampler is not None
            found |= zip(chosen, sampler.draw([asks[index] for index in chosen]), strict=True)
    for index, question in enumerate(questions):
        if question.writer == "data":
            ids = question.prompt.answer_ids
            assert ids, "`Prompts` has left out rows without an answer"
            found[index] = Drawn(ids[:most], (), "stop" if len(ids) <= most else "length")
    return [found[index] for index in range(len(questions))]


def draw_seed(seed: int, *purpose: int | str) -> int:
    """The seed of the draws for a question, of that of the run and of what the draws are for."""
    low, high = fold_key(seed, *purpose)
    return low | (high & 0x7FFFFFFF) << 32


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
