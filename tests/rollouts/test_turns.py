"""Conversations of several turns: what the environment is given, what is learned from, where they end, and what goes wrong."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpar.data import BatchShape, Message, Tokenizer, byte_tokenizer
from mpar.errors import RewardError, RolloutError
from mpar.rollouts import (
    Conversation,
    Environment,
    Exchange,
    HeldOut,
    Prompts,
    Reward,
    Rollout,
    RolloutBatches,
    TokenAdvantages,
    list_rollouts,
    read_rollouts,
)
from mpar.rollouts._advantages import with_token_advantages
from tests.rollouts.made import END, HashSampler, batches, drawing, params, plan, prompts

LONG = Reward("long", 1.0, lambda rollouts: [float(one.num_drawn) for one in rollouts])
SIZES = {"shape": BatchShape(2, 69), "num_batches": 2, "max_prompt_tokens": 4, "max_tokens": 20}


def reply_ids(messages: Sequence[Message], end_id: int) -> list[int]:
    """The digits of what is said, and a mark."""
    assert end_id == END
    return [*(int(sign) for message in messages for sign in str(message["content"])), 7]


def parity(conversation: Conversation) -> str | None:
    """The environment of most tests: it replies to an odd number of digits with that number, and ends on an even one."""
    count = len(conversation.answer)
    return str(count) if count % 2 else None


def started(
    folder: Path, function: Callable[..., object] = parity, sampler: HashSampler | None = None, **changes: object
) -> tuple[RolloutBatches, HashSampler]:
    """Batches of conversations that draw into `folder`."""
    bounds = {name: changes.pop(name) for name in ("max_turns", "max_turn_tokens", "max_tokens") if name in changes}
    of, sampler = plan(**{**SIZES, **bounds}), sampler or HashSampler()
    made, rewards = batches(of), changes.pop("rewards", (LONG,))
    environment = Environment("mine:reply", function)
    made.draw_with(drawing(of, sampler, rewards, environment=environment, reply_ids=reply_ids, **changes), folder)
    return made, sampler


def test_the_policy_writes_until_the_environment_ends_it(tmp_path):
    """Messages alternate, tokens are those of the messages in their order, and the answer is what the policy wrote last."""
    made, _ = started(tmp_path)
    numbers = made.begin(0, params(1.0))
    for one in made.rollouts:
        ids, logps = list(one.answer_ids), list(one.logps)
        assert len(ids) == len(logps) == len(one.drawn)
        for message in one.turns:
            said = [int(sign) for sign in str(message["content"])]
            if message["role"] == "assistant":
                drawn, ids, logps = ids[: len(said)], ids[len(said) :], logps[len(said) :]
                assert drawn == said
            else:
                assert ids[: len(said) + 1] == [*said, 7]
                assert logps[: len(said) + 1] == [0.0] * (len(said) + 1)
                ids, logps = ids[len(said) + 1 :], logps[len(said) + 1 :]
        assert ids == logps == []
        roles = [message["role"] for message in one.turns]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
        assert one.answer == one.turns[-1]["content"]
        assert one.finish == "length" or len(one.answer) % 2 == 0
        marks = itertools.chain.from_iterable(range(*span) for span in one.given)
        assert [index for index, drawn in enumerate(one.drawn) if not drawn] == list(marks)
    turns = [one.num_turns for one in made.rollouts]
    assert max(turns) > 2
    assert numbers["turns"] == pytest.approx(sum(turns) / len(turns))
    assert numbers["answer_tokens"] == pytest.approx(sum(sum(one.drawn) for one in made.rollouts) / len(turns))


def test_only_what_the_policy_wrote_is_learned_from(tmp_path):
    """Labels, answers and log-probabilities of a batch are those of its tokens; what the environment wrote is read alone."""
    made, _ = started(tmp_path)
    made.begin(0, params(1.0))
    rest = iter(made.rollouts)
    seen = 0
    for step in (0, 1):
        batch = made.batch(step)
        for row in range(2):
            for index in range(3):
                one, here = next(rest), batch["documents"][row] == index
                ids, drawn = torch.tensor([*one.prompt_ids, *one.answer_ids]), torch.tensor(one.drawn)
                assert torch.equal(batch["tokens"][row][here], ids[:-1])
                learned = torch.cat([torch.zeros(len(one.prompt_ids) - 1, dtype=torch.bool), drawn])
                assert torch.equal(batch["labels"][row][here], torch.where(learned, ids[1:], -100))
                assert torch.equal(batch["answers"][row][here], torch.where(learned, index, -1))
                assert torch.equal(batch["old_logps"][row][here][learned], torch.tensor(one.logps)[drawn])
                seen += int((~drawn).sum())
    assert seen > 0


def test_the_environment_is_given_the_conversation_so_far(tmp_path):
    """The question, all turns, the columns and the row; its seeds differ between answers and turns, and are those of any run."""
    given: list[Conversation] = []
    made, _ = started(tmp_path / "a", lambda conversation: [given.append(conversation), parity(conversation)][1])
    made.begin(0, params(1.0))
    assert {one.turn for one in given} > {1, 2}
    assert sum(one.turn == 1 for one in given) >= sum(one.finish == "stop" for one in made.rollouts)
    for one in given:
        assert one.messages[0] == {"role": "user", "content": f"question {one.name.removeprefix('document ')}"}
        assert len(one.messages) == 2 * one.turn
        assert one.columns == {"answer": str(int(one.name.removeprefix("document ")) % 3)}
    assert len({one.seed for one in given}) == len(given)
    again: list[Conversation] = []
    other, _ = started(tmp_path / "b", lambda conversation: [again.append(conversation), parity(conversation)][1])
    other.begin(0, params(1.0))
    assert again == given


def test_earlier_messages_of_the_row_are_among_them(tmp_path):
    """A row with messages before its question gives all of them, and no column for them."""
    documents = prompts().documents
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    columns = {**documents.columns, 0: {"prompt": "q", "messages": asked, "answer": "0"}}
    prompt = Prompts(replace(documents, columns=columns), seed=0, shuffle=False).take(0)
    assert (prompt.text, prompt.messages, dict(prompt.columns)) == ("q", tuple(asked), {"answer": "0"})


def test_turns_have_other_draws_and_the_rest_of_the_room(tmp_path):
    """No two questions to the sampler have the same seed and number; each has at most the tokens that are left, or of a turn."""
    made, sampler = started(tmp_path, max_turn_tokens=3)
    draw, asked = sampler.draw, []
    sampler.draw = lambda asks: [asked.extend(asks), draw(asks)][1]
    made.begin(0, params(1.0))
    assert len({(ask.seed, ask.choice) for ask in asked}) == len(asked)
    by_prompt = {one.prompt_ids: one for one in made.rollouts}
    begun = [prompt for ask in asked for prompt in by_prompt if ask.prompt[: len(prompt)] == prompt]
    for ask, prompt in zip(asked, begun, strict=True):
        assert ask.max_tokens == min(3, 20 - (len(ask.prompt) - len(prompt)))


@pytest.mark.parametrize(("bounds", "most"), [({"max_turns": 1}, 1), ({"max_turns": 2}, 2), ({"max_tokens": 7}, 3)])
def test_a_conversation_ends_at_its_bounds(tmp_path, bounds, most):
    """After so many turns, or where no token has room behind the reply, which is then left out and `length` is the reason."""
    made, _ = started(tmp_path, lambda conversation: "1", **bounds)
    made.begin(0, params(1.0))
    assert max(one.num_turns for one in made.rollouts) <= most
    for one in made.rollouts:
        assert len(one.answer_ids) <= bounds.get("max_tokens", 20)
        assert one.turns[-1]["role"] == "assistant"
        assert one.drawn[-1]
    if "max_tokens" in bounds:
        assert {one.finish for one in made.rollouts} == {"length"}
    else:
        assert {one.num_turns for one in made.rollouts if one.finish == "stop"} == {most}


def test_a_run_goes_on_with_the_same_conversations(tmp_path):
    """Between two updates they are read from the file, with what the environment said; at a drawing they are drawn again."""
    made, _ = started(tmp_path)
    expected = []
    for step in range(6):
        made.begin(step, params(float(step)))
        expected.append(made.batch(step))
    assert read_rollouts(list_rollouts(tmp_path)[-1]).rollouts == tuple(made.rollouts)
    assert any(one.given for one in made.rollouts)
    for stop in (1, 4):
        later, _ = started(tmp_path)
        for step in range(stop, 6):
            later.begin(step, params(float(step)))
            assert all(torch.equal(value, expected[step][key]) for key, value in later.batch(step).items())


def test_another_environment_makes_other_batches():
    """The fingerprint changes with the bounds of turns; without them it is that of before."""
    bounds = ({}, {"max_turns": 2}, {"max_turns": 3}, {"max_turn_tokens": 2})
    assert len({plan(**bound).fingerprint for bound in bounds}) == 4
    assert "max_turn" not in plan().fingerprint


def test_ranks_share_the_work(tmp_path):
    """Two ranks have half of the conversations each, however many turns these take; together they are those of one rank."""
    alone, _ = started(tmp_path / "one")
    alone.begin(0, params(1.0))
    parts: list[object] = []
    for rank in (0, 1):
        made, _ = started(tmp_path / "two", rank=rank, size=2, exchange=lambda mine: parts.append(mine) or [mine])
        with pytest.raises(IndexError):
            made.begin(0, params(1.0))
            made.batch(1)
    for rank in (0, 1):
        made, _ = started(tmp_path / "two", rank=rank, size=2, exchange=lambda mine: parts)
        made.begin(0, params(1.0))
        assert made.rollouts == alone.rollouts


def test_held_out_prompts_have_turns_too(tmp_path):
    """Greedily or drawn; their number is among those that are reported."""
    of = plan(**SIZES)
    made = drawing(of, HashSampler(), (LONG,), environment=Environment("mine:reply", parity), reply_ids=reply_ids)
    sets = {"held_out": Prompts(prompts().documents, seed=3, shuffle=False)}
    numbers = HeldOut(sets, made, tmp_path, num_answers=2).measure(1, params(1.0))
    found = read_rollouts(tmp_path / "000001.jsonl").rollouts
    assert numbers["turns"] == pytest.approx(sum(one.num_turns for one in found) / len(found))
    assert numbers["turns"] > 1


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda conversation: 1 / 0, r"turn 1 of the one about document \d, in which .* wrote '\d*', and it raised ZeroDiv"),
        (lambda conversation: 7, r"it returned 7, which is no message\.\nReturn None"),
        (lambda conversation: [], r"it returned \[\], which is no message\.\nReturn None"),
        (lambda conversation: {"role": "user"}, r"which is no dict with role and content\.\nReturn None"),
        (lambda conversation: {"role": "assistant", "content": "x"}, "role='assistant', which is none of user, tool, system"),
        (lambda conversation: "words", r"replied to document \d with messages of user, which cannot be rendered: no digits"),
    ],
)
def test_an_environment_that_goes_wrong_is_named_on_all_ranks(tmp_path, function, message):
    """The error has the function, the row, the turn and what to return; the answers so far are on disk, and other ranks raise the
    same."""

    def refuses(messages: Sequence[Message], end_id: int) -> list[int]:
        if "words" in str(messages):
            raise RewardError("no digits")
        return reply_ids(messages, end_id)

    def begin(rank: int, exchange: Exchange) -> None:
        made, environment = batches(plan(**SIZES)), Environment("mine:reply", function if rank else parity)
        how = {"environment": environment, "reply_ids": refuses, "rank": rank, "size": 2, "exchange": exchange}
        made.draw_with(drawing(plan(**SIZES), HashSampler(), (LONG,), **how), tmp_path)
        made.begin(0, params(1.0))

    parts: list[object] = []
    for rank in (0, 1):
        with contextlib.suppress(RolloutError):
            begin(rank, lambda mine: parts.append(mine) or [mine])
    errors = []
    for rank in (0, 1):
        with pytest.raises(RolloutError, match=message) as error:
            begin(rank, lambda mine: parts)
        assert not isinstance(error.value, RewardError)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    file = read_rollouts(tmp_path / "000000.jsonl")
    assert not file.header.scored
    assert len(file.rollouts) == 12


def test_an_environment_that_does_not_return_is_ended(tmp_path):
    """All its calls for the answers of a rank share the seconds."""
    made, _ = started(tmp_path, lambda conversation: [sum(range(10**6)) for _ in range(10**6)] and None, time_s=0.2)
    with pytest.raises(RolloutError, match=r"was given turn 1 .* and the seconds of task.reward_time_s are over\.\nLet it end"):
        made.begin(0, params(1.0))


def test_advantages_of_tokens_pass_over_the_environment():
    """Those of a conversation are those of one answer with the same tokens without what the environment wrote, which has 0."""
    how = TokenAdvantages(0.1, 0.9, 0.8)
    numbers = {"values": (0.5, 9.0, 9.0, 0.25, 1.0), "reference_logps": (-1.0, 9.0, 9.0, -3.0, -0.5)}
    common = {"prompt": "q", "prompt_ids": (1, 2), "name": "", "group": 0, "choice": 0, "answer": "", "finish": "stop"}
    both = Rollout(
        **common, answer_ids=(1, 2, 3, 4, 5), logps=(-0.5, 0.0, 0.0, -2.0, -1.0), reward=2.0, of_tokens=numbers, given=((1, 3),)
    )
    kept = [0, 3, 4]
    of_tokens = {name: tuple(values[index] for index in kept) for name, values in numbers.items()}
    plain = replace(both, answer_ids=(1, 4, 5), logps=(-0.5, -2.0, -1.0), of_tokens=of_tokens, given=())
    (found,), (expected,) = (with_token_advantages([one], [True], how) for one in (both, plain))
    for name in ("token_advantages", "returns"):
        assert tuple(found.of_tokens[name][index] for index in kept) == expected.of_tokens[name]
        assert found.of_tokens[name][1:3] == (0.0, 0.0)


def test_tokens_of_a_reply_are_those_of_the_whole_conversation():
    """Behind an answer and its end, they continue the tokens of a conversation as its chat template renders it as a whole."""
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "calc"}, {"role": "tool", "content": "2\n"}]
    more = [*messages, {"role": "user", "content": "sure?"}]
    end = tokenizer.eos_id
    assert end is not None
    before = [*tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True), *tokenizer.encode("calc"), end]
    for count in (3, 4):
        whole = tokenizer.apply_chat_template(more[:count], add_generation_prompt=True)
        assert [*before, *tokenizer.encode_reply(more[2:count], end)] == whole


def test_tokens_of_a_reply_do_not_need_the_end_that_the_template_writes():
    """If another token ended the answer, the end that the template writes is a part of the reply."""
    tokenizer = byte_tokenizer()
    reply, (other, end) = [{"role": "user", "content": "go on"}], (65, tokenizer.eos_id)
    assert end is not None
    assert tokenizer.encode_reply(reply, other) == [end, *tokenizer.encode_reply(reply, end)]
    assert isinstance(tokenizer, Tokenizer)
