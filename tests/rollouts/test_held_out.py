"""Held-out prompts: their answers are drawn with seeds of their own, rewarded, kept, and change nothing of the training."""

from dataclasses import replace

import pytest

from mpar.data import BatchShape, DocumentBatches, Documents
from mpar.errors import DataError, RewardError
from mpar.rollouts import HeldOut, Prompts, Reward, RolloutBatches, list_rollouts, read_rollouts
from tests.rollouts.made import HashSampler, batches, drawing, params, plan, prompts

LONG = Reward("long", 1.0, lambda rollouts: [len(one.answer) for one in rollouts])


def held_out(folder, sampler=None, rewards=(LONG,), sets=("held_out",), seed=3, **changes) -> HeldOut:
    """Five prompts in each set."""
    of, changed = plan(), {name: changes.pop(name) for name in ("rank", "size", "exchange") if name in changes}
    made = replace(drawing(of, sampler or HashSampler(), rewards, **changed), seed=seed)
    questions = Prompts(prompts().documents, seed=3, shuffle=False)
    return HeldOut(dict.fromkeys(sets, questions), made, folder, **changes)


def answers_in(folder, step: int) -> list:
    """The answers that were kept after a step."""
    return [one.answer_ids for one in read_rollouts(folder / f"{step:06d}.jsonl").rollouts]


def test_numbers_are_means_over_all_answers(tmp_path):
    """Each prompt has its answers, in a file of the step, whose header has the numbers that are returned."""
    numbers = held_out(tmp_path, num_answers=3).measure(7, params(1.0))
    file = read_rollouts(tmp_path / "000007.jsonl")
    assert [(one.group, one.choice) for one in file.rollouts] == [(group, choice) for group in range(5) for choice in range(3)]
    assert [one.prompt for one in file.rollouts[::3]] == [f"question {index}" for index in range(5)]
    lengths = [len(one.answer) for one in file.rollouts]
    assert numbers["reward"] == numbers["reward/long"] == pytest.approx(sum(lengths) / 15)
    assert numbers["truncated"] == pytest.approx(sum(one.finish == "length" for one in file.rollouts) / 15)
    assert file.header.numbers == numbers
    assert file.header.step == 7


def test_draws_depend_on_seed_and_parameters_and_not_on_the_step(tmp_path):
    """At each time the same draws are made, so that only the policy changes them; another seed makes others."""
    for name, seed, step, value in (("a", 3, 2, 1.0), ("a", 3, 4, 1.0), ("a", 3, 6, 2.0), ("b", 4, 2, 1.0)):
        held_out(tmp_path / name, num_answers=2, seed=seed).measure(step, params(value))
    first = answers_in(tmp_path / "a", 2)
    assert answers_in(tmp_path / "a", 4) == first
    assert answers_in(tmp_path / "a", 6) != first
    assert answers_in(tmp_path / "b", 2) != first
    both = answers_in(tmp_path / "a", 2)
    assert both[::2] != both[1::2]


def test_training_draws_what_it_draws_without(tmp_path):
    """Drawings before and after an evaluation are those of a run that does not evaluate, and no held-out draw is one of these."""
    runs = {}
    for name in ("with", "without"):
        of, sampler = plan(), HashSampler()
        made = batches(of)
        made.draw_with(drawing(of, sampler, (LONG,)), tmp_path / name)
        for step in range(5):
            made.begin(step, params(float(step)))
            if name == "with":
                held_out(tmp_path / name / "held_out", sampler, num_answers=2).measure(step + 1, params(float(step + 1)))
        runs[name] = [path.read_bytes() for path in list_rollouts(tmp_path / name)]
    assert len(runs["with"]) == 2
    assert runs["with"] == runs["without"]


def test_ranks_share_the_prompts(tmp_path):
    """Two ranks answer every other prompt; what they exchange is what one rank finds alone."""
    expected = held_out(tmp_path / "one", num_answers=2).measure(1, params(1.0))
    parts: list[object] = []
    for rank in (0, 1):
        held_out(tmp_path / "x", rank=rank, size=2, exchange=lambda mine: parts.append(mine) or [mine], num_answers=2).measure(
            1, params(1.0)
        )
    for rank in (0, 1):
        sampler = HashSampler()
        of_rank = held_out(tmp_path / "two", sampler, rank=rank, size=2, exchange=lambda mine: parts, num_answers=2)
        assert of_rank.measure(1, params(1.0)) == expected
        assert sampler.asked == (6, 4)[rank]
    assert answers_in(tmp_path / "two", 1) == answers_in(tmp_path / "one", 1)


def test_each_of_several_sets_has_its_numbers(tmp_path):
    """Of two sets with the same prompts the draws differ, and means of all are those of both; num_prompts bounds each."""
    numbers = held_out(tmp_path, sets=("easy", "hard"), num_answers=2, num_prompts=4).measure(1, params(1.0))
    found = read_rollouts(tmp_path / "000001.jsonl").rollouts
    assert len(found) == 16
    easy, hard = ([len(one.answer) for one in part] for part in (found[:8], found[8:]))
    assert easy != hard
    assert numbers["easy/reward"] == pytest.approx(sum(easy) / 8)
    assert numbers["hard/reward"] == pytest.approx(sum(hard) / 8)
    assert numbers["reward"] == pytest.approx(sum(easy + hard) / 16)


def test_a_reward_that_raises_keeps_the_answers(tmp_path):
    """The error says that these are held-out prompts; their answers are in the file, which says that they have no rewards."""
    broken = Reward("broken", 1.0, lambda rollouts: 1 / 0)
    with pytest.raises(RewardError, match=r"broken: it raised ZeroDivisionError.*\n.*held-out prompts"):
        held_out(tmp_path, rewards=[broken]).measure(3, params(1.0))
    file = read_rollouts(tmp_path / "000003.jsonl")
    assert len(file.rollouts) == 5
    assert not file.header.scored


def test_prompts_that_are_too_long_are_counted(tmp_path):
    """Rows whose prompt is longer than the plan allows are left out, and are too long and dropped in the report, on both sides of
    a split."""
    sizes = [2, 6, 3, 7, 4]
    documents = Documents.from_ids([([i, *range(1, size), 8, 9], [False] * size + [True] * 2) for i, size in enumerate(sizes)])
    made = DocumentBatches(documents, BatchShape(1, 10), vocab_size=10, seed=3)
    made.report = replace(made.report, num_rows=5, num_used=5).of(documents)
    rollouts = RolloutBatches(made, plan(), rewards="sum")
    report = rollouts.report
    assert (report.num_used, report.num_too_long, report.num_dropped, report.num_documents) == (3, 2, 2, 3)
    assert report.num_tokens == sum(size + 1 for size in (2, 3, 4))
    assert "2 too long (2 dropped)" in str(report)
    assert sorted(rollouts.questions.take(index).ids[0] for index in range(3)) == [0, 2, 4]
    training, other = rollouts.split(0.4)
    assert (len(training.questions), len(other.questions)) == (2, 1)
    assert training.report.num_dropped == 2
    assert training.report.num_held_out == 1
    ids = [part.questions.take(index).ids for part in (training, other) for index in range(len(part.questions))]
    assert sorted(one[0] for one in ids) == [0, 2, 4]
    longer = Documents.from_ids([([1] * 6, [False] * 6), ([1] * 7, [False] * 7)])
    with pytest.raises(DataError, match="none of the 2 prompts"):
        RolloutBatches(DocumentBatches(longer, BatchShape(1, 10), vocab_size=10), plan(), rewards="sum")


def test_conversations_without_an_answer_are_counted_before_anything_is_drawn():
    """Where some answers are those of the data, rows that have none are left out and are malformed in the report of every rank;
    where the policy or a teacher writes all answers, they are prompts like others."""
    with_answer = [([i, 1, 8, 9], [False, False, True, True]) for i in (0, 2)]
    documents = Documents.from_ids([with_answer[0], ([5, 1, 1], [False] * 3), ([6] * 6, [False] * 6), with_answer[1]])
    made = DocumentBatches(documents, BatchShape(1, 10), vocab_size=10, seed=3)
    made.report = replace(made.report, num_rows=4, num_used=4).of(documents)
    alone = {"group_size": 1, "rewarded": False}
    rollouts = RolloutBatches(made, plan(**alone, policy_share=0.5), rewards="")
    report = rollouts.report
    assert (report.num_used, report.num_malformed, report.num_too_long, report.num_documents) == (2, 2, 0, 2)
    assert str(report.malformed[0]) == "document 1: no answer, and the policy writes only some"
    assert sorted(rollouts.questions.take(index).ids[0] for index in range(2)) == [0, 2]
    for changes in ({"policy_share": 1.0}, {"policy_share": 0.5, "teacher": True}):
        others = RolloutBatches(made, plan(**alone, **changes), rewards="").report
        assert (others.num_used, others.num_malformed, others.num_too_long) == (3, 0, 1)
    nobody = DocumentBatches(Documents.from_ids([([5, 1], [False] * 2)]), BatchShape(1, 10), vocab_size=10)
    with pytest.raises(DataError, match=r"none of the 1 prompts .* and 1 have no answer to learn from"):
        RolloutBatches(nobody, plan(**alone, policy_share=0.5), rewards="")
