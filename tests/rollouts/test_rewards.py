"""Rewards: the rules that have names, programs in a limited process, and functions that go wrong."""

import math
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch

from mpar.errors import ConfigError, DataError, RewardError
from mpar.rollouts import RewardSpec, make_rewards, reward_problems
from mpar.rollouts.rewards import Reward, score
from tests.rollouts.made import rollout


def given(name: str, answers: list[str], columns: dict[str, object] | None = None, **options: object) -> list[float | None]:
    """What a reward gives for these answers."""
    (reward,) = make_rewards([RewardSpec(name, 1.0, options)])
    return [found.reward for found in score([reward], [rollout(answer, columns) for answer in answers])]


def test_exact_compares_numbers_as_numbers_and_texts_as_texts():
    """White space, zeros behind the point and commas in thousands make no difference; another number does."""
    answers = ["7", " 7\n", "7.0", "07", "8", "seven", "7 apples", ""]
    assert given("exact", answers, {"answer": "7"}) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert given("exact", ["1,200"], {"answer": 1200}) == [1]
    assert given("exact", ["Paris", "paris", "nan"], {"answer": "Paris"}) == [1, 0, 0]
    assert given("exact", ["nan"], {"answer": "nan"}) == [1]


def test_exact_reads_what_the_pattern_finds_last():
    """The first group of the last match is compared; without a match the answer is wrong."""
    answers = ["#### 3 no #### 4", "#### 4 no #### 3", "4"]
    assert given("exact", answers, {"solution": "4"}, column="solution", pattern=r"#### (\d+)") == [1, 0, 0]


def test_a_missing_column_is_named_with_those_that_there_are():
    """The error says which column is read, and how another is named."""
    with pytest.raises(RewardError, match=r"column 'answer', which data.jsonl:1 does not have; its columns are solution"):
        given("exact", ["4"], {"solution": "4"})
    assert issubclass(RewardError, ValueError)
    assert issubclass(DataError, ValueError)


def test_format_and_lengths():
    """A format must match everything; a length costs what is beyond it."""
    assert given("format", ["<think>a\nb</think>1", "x<think></think>1"], pattern=r"<think>.*</think>\d") == [1, 0]
    assert given("length", ["a" * 4, "a" * 5, "a" * 10], target=5) == [0, 0, -1]
    assert given("overlong", ["a" * 6, "a" * 8, "a" * 10, "a" * 14], max_tokens=10, cache=4) == [0, -0.5, -1, -1]


def test_cosine_prefers_short_right_answers_and_long_wrong_ones():
    """Half a wave between the two numbers of a range, which ends at max_tokens."""
    answers = ["7", "7" + " " * 4, "7" + " " * 9, "7" + " " * 30, "8", "8" * 5, "8" * 10]
    expected = [0.75 + 0.25 * math.cos(math.pi / 10), 0.75, 0.5, 0.5, -0.25 - 0.25 * math.cos(math.pi / 10), -0.25, 0.0]
    assert given("cosine", answers, {"answer": "7"}, max_tokens=10) == pytest.approx(expected)
    assert given("cosine", ["7", "8"], {"answer": "7"}, max_tokens=1, correct=[3, 2], wrong=[-3, -2]) == [2, -2]
    with pytest.raises(RewardError, match=r"needs max_tokens of at least 1, and two numbers each"):
        given("cosine", ["7"], {"answer": "7"}, max_tokens=10, correct=[1])


def test_repetition_costs_the_share_of_sequences_that_came_before():
    """Five sequences of two words, of which three came before; too short answers have none."""
    assert given("repetition", ["a b a B\na b", "a b", "", "a b c d"], words=2) == pytest.approx([-0.6, 0, 0, 0])
    assert given("repetition", ["a b c a b c"], penalty=2.0) == [-0.5]
    with pytest.raises(RewardError, match="at least 1 word, not of 0"):
        given("repetition", ["a"], words=0)


def test_programs_run_with_limits():
    """Right ends well; wrong, endless, greedy and silent exits with an error do not."""
    programs = [
        "def f(x): return x + 1",
        "Here:\n```python\ndef f(x): return x + 1\n```\nDone.",
        "def f(x): return x",
        "while True: pass",
        "x = bytearray(2**30)",
        "import sys; sys.exit(3)",
        "def f(x: return",
    ]
    found = given("code", programs, {"tests": "assert f(1) == 2"}, time_s=1.0, memory_mb=256)
    assert found == [1, 1, 0, 0, 0, 0, 0]


def test_rewards_are_weighed_and_those_that_are_none_are_left_out():
    """None and NaN leave a reward out of the sum; a rollout with none at all has none."""
    rewards = [
        Reward("a", 2.0, lambda rollouts: [1, None, None, True]),
        Reward("b", 0.5, lambda rollouts: torch.tensor([1.0, 3.0, math.nan, 0.0])),
        Reward("c", 1.0, lambda rollouts: np.array([0.0, math.nan, math.nan, 1.0], np.float32)),
    ]
    found = score(rewards, [rollout("x")] * 4)
    assert [one.reward for one in found] == [2.5, 1.5, None, 3.0]
    assert found[1].rewards == {"a": None, "b": 3.0, "c": None}


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rollouts: 1 / 0, "raised ZeroDivisionError"),
        (lambda rollouts: sys.exit(1), "raised SystemExit"),
        (lambda rollouts: None, "returned None"),
        (lambda rollouts: "12", "returned '12'"),
        (lambda rollouts: [1.0], "returned 1 values for 2 rollouts"),
        (lambda rollouts: [1.0, math.inf], "returned inf, which is no finite number"),
        (lambda rollouts: [1.0, "good"], "'x' to data.jsonl:1 it returned 'good'"),
        (lambda rollouts: (1 / 0 for one in rollouts), "raised ZeroDivisionError.*; the last rollout that it read is"),
        (lambda rollouts: [1.0, torch.ones(2)], "'x' to data.jsonl:1 it returned tensor"),
        (lambda rollouts: [1.0, 10**400], "returned 1000.*, which is no finite number"),
    ],
)
def test_a_function_that_goes_wrong_is_named(function, message):
    """The error names the reward, and what it did."""
    with pytest.raises(RewardError, match=f"cannot reward answers with mine: .*{message}"):
        score([Reward("mine", 1.0, function)], [rollout("x")] * 2)


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["in a regular expression", "asleep"])
def test_a_function_that_does_not_return_is_ended(where):
    """The error names the function and the row that it read last; a handler of all exceptions does not catch it."""

    def stuck(rollouts):
        for one in rollouts:
            try:
                if one.name.endswith(":2"):
                    re.match(r"(a+)+$", "a" * 40 + "b") if where.startswith("in") else time.sleep(60)
            except Exception:
                pass
        return [1.0] * len(rollouts)

    rows = [rollout("x"), rollout("why", name="data.jsonl:2"), rollout("y", name="data.jsonl:3")]
    before = signal.getsignal(signal.SIGALRM)
    message = (
        r"mine: task.reward_time_s=0.2 seconds are over.*3 rollouts; the last that it read is the answer 'why' to data.jsonl:2"
    )
    with pytest.raises(RewardError, match=message):
        score([Reward("mine", 1.0, stuck)], rows, 0.2)
    assert signal.getsignal(signal.SIGALRM) is before
    assert score([Reward("mine", 1.0, lambda rollouts: [1.0] * 3)], rows, 5.0)[0].reward == 1.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_function_that_raises_says_at_which_row():
    """The row that it read last is named."""
    rows = [rollout("x"), rollout("why", name="data.jsonl:2")]
    with pytest.raises(
        RewardError, match=r"raised ValueError: .*the last rollout that it read is the answer 'why' to data.jsonl:2"
    ):
        score([Reward("mine", 1.0, lambda rollouts: [int(one.answer, 36) + int(one.name[-1], 2) for one in rollouts])], rows)


def test_wrong_rewards_are_listed_before_anything_runs():
    """Names, options and weights are checked together."""
    specs = [
        RewardSpec("exakt"),
        RewardSpec("format"),
        RewardSpec("overlong", 1.0, {"max_tokens": "many", "cache": 4}),
        RewardSpec("length", math.nan, {"target": 4}),
        RewardSpec("length", 1.0, {"target": 4}),
    ]
    problems = "\n".join(reward_problems(specs))
    for part in ("'exakt' is no reward", "pattern is missing", "max_tokens='many'", "weight of length", "length is named twice"):
        assert part in problems
    with pytest.raises(ConfigError, match="there is no reward"):
        make_rewards([])
