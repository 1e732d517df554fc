"""Draws the answers of one rollout: prompts to the sampler, texts to the rewards, and groups that teach nothing once more."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpar.errors import RewardError, RolloutError
from mpar.ops import fold_key
from mpar.rollouts._advantages import advantages, is_even
from mpar.rollouts._drawing import Drawing, Question, draw_seed
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompt
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Drawn
from mpar.rollouts._turns import go_on, with_turn
from mpar.rollouts.rewards import score

__all__ = ["answer_numbers", "answered", "draw", "numbers_of", "with_advantages"]


def draw(drawing: Drawing, number: int) -> tuple[list[Rollout], RolloutError | None]:
    """The answers of rollout `number` with their rewards, group by group, and why there is not all of this, if so; then some
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
) -> tuple[dict[int, list[Rollout]], RolloutError | None]:
    """`size` answers with their rewards to each question, by its index, and why there is not all of this, if so.

    greedy: each token is the likeliest one. Every rank draws and rewards some of the questions, and all have all answers, or the
    reason why a rank could not give its own.
    """
    mine = range(drawing.rank, len(questions), drawing.size)
    drawn, error = _drawn(drawing, [questions[index] for index in mine], size, greedy)
    try:
        drawn = drawn if error is not None else score(drawing.rewards, drawn, drawing.time_s)
    except RewardError as problem:
        error = problem
    of_mine = {index: drawn[i * size : (i + 1) * size] for i, index in enumerate(mine)}
    parts: list[tuple[dict[int, list[Rollout]], RolloutError | None]] = drawing.exchange((of_mine, error))  # type: ignore[assignment]
    error = next((found for _, found in parts if found is not None), None)
    groups = {index: group for part, _ in parts for index, group in part.items()}
    if error is None and drawing.models:
        return _scored_by_models(drawing, groups, size)
    return groups, error


def _scored_by_models(
    drawing: Drawing, groups: Mapping[int, list[Rollout]], size: int
) -> tuple[dict[int, list[Rollout]], RolloutError | None]:
    """The groups with the rewards of models, too; and why that was not possible, if so."""
    flat = [rollout for slot in sorted(groups) for rollout in groups[slot]]
    try:
        scored = score(drawing.models, flat)
    except RewardError as problem:
        return dict(groups), problem
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
        "answer_tokens": _mean([rollout.num_drawn for rollout in rollouts]),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts) / count,
    }
    if any(rollout.turns for rollout in rollouts):
        lengths["turns"] = _mean([rollout.num_turns for rollout in rollouts])
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


def _drawn(
    drawing: Drawing, questions: Sequence[Question], size: int, greedy: bool
) -> tuple[list[Rollout], RolloutError | None]:
    """`size` answers without rewards to each question, all of a question next to each other; and why a conversation could not go
    on, if so."""
    asked = [question for question in questions for _ in range(size)]
    most = drawing.plan.max_turn_tokens
    asks = [Ask(question.prompt.ids, question.seed, i % size, greedy, most) for i, question in enumerate(asked)]
    begun = [_asked(drawing, question, ask) for question, ask in zip(asked, asks, strict=True)]
    answers = _answers(drawing, asked, asks)
    first = [with_turn(drawing, rollout, answer) for rollout, answer in zip(begun, answers, strict=True)]
    return go_on(drawing, asked, first, greedy=greedy)


def _asked(drawing: Drawing, question: Question, ask: Ask) -> Rollout:
    """The rollout of a question that has no answer yet."""
    return Rollout(
        prompt=question.prompt.text or drawing.decode(question.prompt.ids),
        prompt_ids=ask.prompt,
        name=question.prompt.name,
        group=question.group,
        choice=ask.choice,
        answer="",
        answer_ids=(),
        logps=(),
        finish="",
        columns=_columns(drawing, question.prompt),
        writer=question.writer,
    )


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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
