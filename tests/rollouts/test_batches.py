"""Batches of rollouts: what lies where, when answers are drawn, how a run goes on, and what goes wrong."""

import json

import pytest
import torch

from mpar.errors import CheckpointError, ConfigError, RewardError
from mpar.rollouts import Reward, RolloutBatches, list_rollouts, read_rollouts
from tests.rollouts.made import HashSampler, batches, drawing, params, plan, rollout

LONG = Reward("long", 1.0, lambda rollouts: [len(one.answer) for one in rollouts])


def started(tmp_path, of=None, sampler=None, rewards=(LONG,), **changes) -> tuple[RolloutBatches, HashSampler]:
    """Batches that draw into `tmp_path`."""
    of, sampler = of or plan(), sampler or HashSampler()
    made = batches(of)
    made.draw_with(drawing(of, sampler, rewards, **changes), tmp_path)
    return made, sampler


def test_a_row_holds_answers_with_their_columns(tmp_path):
    """Of every answer, tokens, labels, positions, document, log-probabilities and advantage lie where the answer is."""
    made, _ = started(tmp_path)
    made.begin(0, params(1.0))
    seen = []
    for step in (0, 1):
        batch = made.batch(step)
        for row in range(2):
            for index in range(3):
                one = made.rollouts[(step * 2 + row) * 3 + index]
                seen.append(one)
                here = batch["documents"][row] == index
                ids = torch.tensor([*one.prompt_ids, *one.answer_ids])
                assert torch.equal(batch["tokens"][row][here], ids[:-1])
                assert torch.equal(batch["positions"][row][here], torch.arange(len(ids) - 1))
                of_answer = batch["answers"][row] == index
                assert torch.equal(batch["labels"][row][of_answer], torch.tensor(one.answer_ids))
                assert torch.equal(batch["old_logps"][row][of_answer], torch.tensor(one.logps))
                assert (here & of_answer).sum() == of_answer.sum() == len(one.answer_ids)
                assert batch["advantages"][row, index] == torch.tensor(one.advantage)
        assert torch.equal(batch["answers"] >= 0, batch["labels"] != -100)
        assert batch["advantages"].shape == (2, 3)
    assert len({(one.group, one.choice) for one in seen}) == 12
    assert any(one.advantage > 0 for one in seen)


def test_answers_are_drawn_when_it_is_time_to(tmp_path):
    """Four updates learn from one drawing: two batches, twice; the next one is drawn with the parameters of its time."""
    made, sampler = started(tmp_path)
    batch = {}
    for step in range(5):
        made.begin(step, params(float(step)))
        batch[step] = made.batch(step)
    assert sampler.loads == 2
    assert sampler.params == 8.0
    for key in batch[0]:
        assert torch.equal(batch[0][key], batch[2][key])
        assert torch.equal(batch[1][key], batch[3][key])
    assert not torch.equal(batch[0]["tokens"], batch[1]["tokens"])
    assert [path.name for path in list_rollouts(tmp_path)] == ["000000.jsonl", "000001.jsonl"]


@pytest.mark.cases(4)
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_goes_on_with_the_same_bits(tmp_path, stop):
    """Before an update that learns from earlier answers, these are read; else they are drawn again: the same ones."""
    made, _ = started(tmp_path)
    expected = []
    for step in range(6):
        made.begin(step, params(float(step)))
        expected.append(made.batch(step))
    later, sampler = started(tmp_path)
    for step in range(stop, 6):
        later.begin(step, params(float(step)))
        for key, value in later.batch(step).items():
            assert torch.equal(value, expected[step][key])
    assert sampler.loads == 1  # only the second drawing; the first is read from its file


def test_ranks_share_the_work_and_have_the_same_batches(tmp_path):
    """Two ranks draw half of the groups each; what they exchange is what one rank draws alone."""
    alone, _ = started(tmp_path / "one")
    alone.begin(0, params(1.0))
    parts: list[object] = []
    for rank in (0, 1):  # first what each rank gives, then what each has of both
        made, _ = started(tmp_path / "two", rank=rank, size=2, exchange=lambda mine: parts.append(mine) or [mine])
        with pytest.raises(IndexError):
            made.begin(0, params(1.0))
            made.batch(1)
    for rank in (0, 1):
        made, sampler = started(tmp_path / "two", rank=rank, size=2, exchange=lambda mine: parts)
        made.begin(0, params(1.0))
        assert sampler.asked == 6
        assert made.rollouts == alone.rollouts
    assert read_rollouts(tmp_path / "two" / "000000.jsonl") == read_rollouts(tmp_path / "one" / "000000.jsonl")


def test_draws_are_those_of_the_seed(tmp_path):
    """The same seed asks the same, with the same seeds of draws, others in each drawing; another seed has others."""
    asked = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        made, sampler = started(tmp_path / name, seed=seed)
        draw, asked[name] = sampler.draw, []
        sampler.draw = lambda asks, draw=draw, seen=asked[name]: [seen.extend(asks), draw(asks)][1]
        made.begin(0, params(1.0))
        made.begin(4, params(1.0))
    assert asked["a"] == asked["b"]
    seeds = {name: [ask.seed for ask in asks] for name, asks in asked.items()}
    assert not set(seeds["a"]) & set(seeds["c"])
    assert len(set(seeds["a"])) == 8  # four groups in each of two drawings; the answers of a group differ by their number
    assert {(ask.seed, ask.choice) for ask in asked["a"]} == {(seed, choice) for seed in seeds["a"] for choice in range(3)}


def test_groups_that_teach_nothing_are_drawn_again_for_other_prompts(tmp_path):
    """Where all answers of a group are worth the same, other prompts take its place, up to the number of attempts."""
    picky = Reward("picky", 1.0, lambda rollouts: [float(one.answer_ids[0] == 5) for one in rollouts])
    numbers = {}
    for redraws in (0, 3):
        made, _ = started(tmp_path / str(redraws), plan(max_redraws=redraws), rewards=[picky])
        numbers[redraws] = made.begin(0, params(1.0))["even_groups"]
        assert len({one.group for one in made.rollouts}) == 4
    assert numbers[3] < numbers[0]


def test_answers_without_a_reward_or_an_end_are_not_learned_from(tmp_path):
    """They keep their place in the row, without labels, and are counted."""
    given = Reward("some", 1.0, lambda rollouts: [None if one.choice == 0 else float(one.choice) for one in rollouts])
    made, _ = started(tmp_path, plan(drop_truncated=True), rewards=[given])
    numbers = made.begin(0, params(1.0))
    assert numbers["without_reward"] == pytest.approx(1 / 3)
    dropped = [one.reward is None or one.finish == "length" for one in made.rollouts[:3]]
    batch = made.batch(0)
    assert [bool((batch["answers"][0] == index).any()) for index in range(3)] == [not gone for gone in dropped]
    assert (batch["documents"][0] == 0).any()


def test_a_reward_that_raises_stops_the_run_and_loses_nothing(tmp_path):
    """The answers are on disk without rewards; once the function is mended, the same ones are drawn and rewarded."""
    broken = Reward("broken", 1.0, lambda rollouts: 1 / 0)
    made, _ = started(tmp_path, rewards=[broken])
    with pytest.raises(RewardError, match=r"broken: it raised ZeroDivisionError.*\n.*000000.jsonl"):
        made.begin(0, params(1.0))
    failed = read_rollouts(tmp_path / "000000.jsonl")
    assert not failed.header.scored
    mended, _ = started(tmp_path)
    mended.begin(0, params(1.0))
    assert [one.answer_ids for one in mended.rollouts] == [one.answer_ids for one in failed.rollouts]


def test_a_run_does_not_go_on_with_the_answers_of_another(tmp_path):
    """Answers that are gone, damaged, not rewarded or drawn for other batches are refused, with what to do."""
    made, _ = started(tmp_path)
    with pytest.raises(CheckpointError, match=r"000000.jsonl is gone.\n.*a step that 4 divides"):
        made.begin(1, params(1.0))
    made.begin(0, params(1.0))
    path = tmp_path / "000000.jsonl"
    text = path.read_text(encoding="utf-8")
    other, _ = started(tmp_path, plan(scale="none"))
    with pytest.raises(CheckpointError, match="of another run"):
        other.begin(1, params(1.0))
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read the rollouts"):
        started(tmp_path)[0].begin(1, params(1.0))


def test_files_keep_every_character_and_every_bit(tmp_path):
    """Line separators in answers, and float32 log-probabilities, come back as they were."""
    odd = rollout("a\u2028b\nc\x85d", {"x": [1, {"y": None}]}, logps=tuple(torch.randn(7).tolist()))
    sampler = HashSampler()
    made, _ = started(tmp_path, sampler=sampler)
    made.begin(0, params(1.0))
    path = tmp_path / "000000.jsonl"
    header = path.read_text(encoding="utf-8").split("\n")[0]
    path.write_text(f"{header}\n{json.dumps(vars(odd), ensure_ascii=False)}\n", encoding="utf-8")
    assert read_rollouts(path).rollouts == (odd,)


def test_sizes_that_do_not_fit_are_all_named():
    """A row must have room for the longest answer, and groups must be full."""
    with pytest.raises(ConfigError, match=r"group_size=1: the answers .*\n.*seq_len=23 positions.*may take 26"):
        plan(group_size=1, max_tokens=23)
    with pytest.raises(ConfigError, match=r"12 answers are drawn .*no full groups of group_size=5: take a batch of 10 rows"):
        plan(group_size=5)
