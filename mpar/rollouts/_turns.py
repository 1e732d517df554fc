"""Conversations of several turns: the environment replies, its words become tokens, and the policy writes again."""

import time
from collections.abc import Sequence
from dataclasses import replace

from mpar.data import Message
from mpar.errors import MparError, RolloutError
from mpar.rollouts._drawing import Drawing, Question, draw_seed
from mpar.rollouts._environment import Conversation, Environment
from mpar.rollouts._rollout import Rollout
from mpar.rollouts._sampler import Ask, Drawn

__all__ = ["go_on", "with_turn"]


def with_turn(drawing: Drawing, rollout: Rollout, answer: Drawn) -> Rollout:
    """The rollout behind which the policy has written `answer`."""
    text = drawing.decode(answer.tokens)
    said: tuple[Message, ...] = () if drawing.environment is None else ({"role": "assistant", "content": text},)
    return replace(
        rollout,
        answer=text,
        answer_ids=(*rollout.answer_ids, *answer.tokens),
        logps=(*rollout.logps, *answer.logps),
        finish=answer.finish,
        turns=(*rollout.turns, *said),
    )


def go_on(
    drawing: Drawing, questions: Sequence[Question], rollouts: Sequence[Rollout], *, greedy: bool
) -> tuple[list[Rollout], RolloutError | None]:
    """The rollouts after as many turns as the environment and the plan let each have; and why one could not go on, if so.

    rollouts: after the first turn. questions: what each answers. All conversations that go on are drawn together, turn by turn.
    """
    found, turn, spent_s = list(rollouts), 1, 0.0
    going = [index for index, one in enumerate(found) if one.finish == "stop"] if drawing.environment is not None else []
    while going and turn != drawing.plan.max_turns:
        assert drawing.environment is not None
        asked = [_conversation(questions[index], found[index], turn) for index in going]
        began = time.monotonic()
        try:
            replies = drawing.environment.replies(asked, _remaining(drawing, spent_s))
            for index, reply in zip(going, replies, strict=True):
                found[index] = _with_reply(drawing, drawing.environment, found[index], reply)
        except RolloutError as problem:
            return found, problem
        spent_s += time.monotonic() - began
        going = [index for index, reply in zip(going, replies, strict=True) if reply and found[index].finish == "stop"]
        asks = [_ask(drawing, questions[index], found[index], turn, greedy) for index in going]
        for index, answer in zip(going, drawing.sampler.draw(asks) if asks else [], strict=True):
            found[index] = with_turn(drawing, found[index], answer)
        going = [index for index in going if found[index].finish == "stop"]
        turn += 1
    return found, None


def _remaining(drawing: Drawing, spent_s: float) -> float | None:
    """The seconds that the environment may still take; a moment, if there are none left."""
    return None if drawing.time_s is None else max(1e-3, drawing.time_s - spent_s)


def _conversation(question: Question, rollout: Rollout, turn: int) -> Conversation:
    seed = draw_seed(question.seed, "environment", rollout.choice, turn)
    return Conversation((*question.prompt.messages, *rollout.turns), turn, rollout.columns, rollout.name, seed)


def _with_reply(drawing: Drawing, environment: Environment, rollout: Rollout, reply: Sequence[Message]) -> Rollout:
    """The rollout with what the environment replies to it; it has ended by its length if no token has room behind that."""
    if not reply:
        return rollout
    assert drawing.reply_ids is not None
    try:
        ids = tuple(drawing.reply_ids(reply, rollout.answer_ids[-1]))
    except MparError as error:
        roles = ", ".join(str(message["role"]) for message in reply)
        raise RolloutError(
            f"cannot go on with a conversation: task.environment={environment.name} replied to {rollout.name} with messages of "
            f"{roles}, which cannot be rendered: {error}"
        ) from error
    begin = len(rollout.answer_ids)
    if begin + len(ids) >= drawing.plan.max_tokens:
        return replace(rollout, finish="length")
    return replace(
        rollout,
        answer_ids=(*rollout.answer_ids, *ids),
        logps=(*rollout.logps, *(0.0 for _ in ids)),
        given=(*rollout.given, (begin, begin + len(ids))),
        turns=(*rollout.turns, *reply),
    )


def _ask(drawing: Drawing, question: Question, rollout: Rollout, turn: int, greedy: bool) -> Ask:
    """What the policy is asked for the turn behind `turn` others, whose draws are other ones than theirs."""
    room = drawing.plan.max_tokens - len(rollout.answer_ids)
    prompt, seed = (*rollout.prompt_ids, *rollout.answer_ids), draw_seed(question.seed, "turn", turn)
    return Ask(prompt, seed, rollout.choice, greedy, min(room, drawing.plan.max_turn_tokens or room))
