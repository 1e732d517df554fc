"""`mpar rollouts` shows what a run drew; `mpar train task=grpo` draws the same answers on several ranks."""

import dataclasses

import pytest
import torch

from mpar import checkpoint
from mpar.cli.main import main
from mpar.rollouts import Reward, list_rollouts, read_rollouts
from mpar.train import read_metrics
from tests.cli.conftest import run_mpar
from tests.rollouts.made import HashSampler, batches, drawing, params, plan
from tests.rollouts.test_turns import started
from tests.train.test_rollouts import COMMON, ECHO, GRPO, write_arithmetic, write_echo

TWO = [
    Reward("long", 1.0, lambda rollouts: [len(one.answer) for one in rollouts]),
    Reward("even", 1.0, lambda rollouts: [len(one.answer) % 2 for one in rollouts]),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run_dir of a run that drew twice."""
    monkeypatch.setenv("COLUMNS", "200")
    of = plan()
    made = batches(of)
    made.draw_with(drawing(of, HashSampler(), TWO), tmp_path / "rollouts")
    for step in range(5):
        made.begin(step, params(float(step)))
    return tmp_path


def test_a_line_for_each_drawing_and_a_picture(run, capsys):
    """Mean rewards are those of the files; the picture is one."""
    assert main(["rollouts", "list", str(run), "--picture", str(run / "reward.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"number", "step", "without_reward", "reward_std", "reward/even"} <= set(lines[0].split())
    for line, path in zip(lines[1:3], list_rollouts(run / "rollouts"), strict=True):
        numbers = read_rollouts(path).header.numbers
        assert f"{numbers['reward']:.4g}" in line.split()
        assert f"{numbers['reward/even']:.4g}" in line.split()
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_answers_are_filtered_and_sorted(run, capsys):
    """Of the newest drawing, or of one by number, only what the filters let through, the highest first."""
    assert main(["rollouts", "show", str(run), "--number", "0", "--min-reward", "3", "--sort", "reward", "--finish", "stop"]) == 0
    shown = capsys.readouterr().out
    rollouts = read_rollouts(list_rollouts(run / "rollouts")[0]).rollouts
    passing = [one for one in rollouts if one.reward >= 3 and one.finish == "stop"]
    assert 0 < len(passing) < len(rollouts)
    assert f"of {len(passing)} that pass, of {len(rollouts)} answers" in shown
    found = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    by_name = {f"{one.group}.{one.choice}": one.reward for one in rollouts}
    assert [by_name[name] for name in found] == sorted((one.reward for one in passing), reverse=True)
    assert main(["rollouts", "show", str(run), "--group", str(rollouts[0].group)]) == 0
    assert "0 of 0 that pass" in capsys.readouterr().out  # the newest drawing has other groups


def test_conversations_are_shown(tmp_path, monkeypatch, capsys):
    """With all that the environment said, by its role; a text of it is found; tokens are those that the policy wrote."""
    monkeypatch.setenv("COLUMNS", "200")
    made, _ = started(tmp_path / "rollouts")
    made.begin(0, params(1.0))
    assert main(["rollouts", "show", str(tmp_path), "--full", "--contains", "[user] 3"]) == 0
    shown = capsys.readouterr().out
    found = [one for one in made.rollouts if "[user] 3" in one.text]
    assert 0 < len(found) < len(made.rollouts)
    assert f"{len(found)} of {len(found)} that pass" in shown
    assert "[user] 3" in shown
    assert "turns" in shown
    sizes = {cells[4].strip() for line in shown.splitlines() if len(cells := line.split("│")) > 4 and cells[4].strip()}
    assert sizes == {str(one.num_drawn) for one in found}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "nowhere"], "there are no rollouts in nowhere"),
        (["show", "RUN", "--number", "7"], "there is no drawing 7"),
        (["show", "RUN", "--sort", "size"], "invalid choice: 'size'"),
        (["tell", "RUN"], "invalid choice: 'tell'"),
    ],
)
def test_what_is_not_there_is_said(run, args, message, capsys):
    """The error says what there is, and the exit code tells a wrong command from a run without rollouts."""
    code = main(["rollouts", *(str(run) if arg == "RUN" else arg for arg in args)])
    assert code == (2 if "choice" in message else 1)
    assert message in capsys.readouterr().err


RANKS = [
    *COMMON,
    *GRPO,
    *ECHO,
    *("adapter=lora", "adapter.alpha=64", "task.rollout_rounds=2", "data.tokenizer=digits", "num_threads=1", "tensorboard=false"),
    *("optimizer.lr_decay=constant", "evaluation.sources=[prompts.jsonl#4]", "evaluation.every=2"),
]
TWO_RANKS = ("mesh=fsdp2", "strategy=zero3")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run on two ranks, with an adapter and frozen weights, all sharded; each rank draws half of the groups, and
    answers have several turns."""
    folder = tmp_path_factory.mktemp("two")
    write_arithmetic(folder)
    write_echo(folder)
    done = run_mpar(["train", *RANKS, *TWO_RANKS, "steps=3", "run_dir=two"], folder)
    assert done.returncode == 0, done.stderr
    assert "held-out prompts:" in done.stdout
    assert all(record["grad_norm"] > 0 for record in read_metrics(folder / "two" / "metrics.jsonl"))
    return folder


def drawn(run_dir):
    """The answers of a run without their log-probabilities, which ranks round in other ways, and its held-out rewards by step."""
    files = [read_rollouts(path) for path in list_rollouts(run_dir / "rollouts")]
    records = read_metrics(run_dir / "metrics.jsonl")
    rewards = {record["step"]: record["eval_reward"] for record in records if "eval_reward" in record}
    return [dataclasses.replace(one, logps=()) for file in files for one in file.rollouts], rewards


@pytest.mark.gloo
def test_two_ranks_draw_the_answers_of_one(two):
    """The tokens, losses and held-out rewards of one rank; these are in the metrics at the steps that were asked for."""
    done = run_mpar(["train", *RANKS, "mesh=one", "steps=3", "run_dir=one"], two)
    assert done.returncode == 0, done.stderr
    answers, rewards = drawn(two / "two")
    assert (answers, rewards) == drawn(two / "one")
    assert list(rewards) == [2, 3]
    assert {one.num_turns for one in answers} >= {1, 2}
    assert [path.stem for path in list_rollouts(two / "two" / "rollouts" / "held_out")] == ["000002", "000003"]


@pytest.mark.gloo
def test_two_ranks_go_on_between_two_updates(two):
    """A run that stops after the first of two updates of a drawing reads its answers, and ends with the same bits."""
    for steps in (1, 3):
        done = run_mpar(["train", *RANKS, *TWO_RANKS, f"steps={steps}", "run_dir=parts"], two)
        assert done.returncode == 0, done.stderr
    readers = [checkpoint.Reader(two / name / "checkpoints" / "step_00000003") for name in ("two", "parts")]
    with readers[0] as one, readers[1] as parts:
        assert one.tensors.keys() == parts.tensors.keys()
        assert all(torch.equal(one.read(name), parts.read(name)) for name in one.tensors)


def test_options_that_do_not_go_together_are_listed_at_once(capsys):
    """Before anything is read: rewards, weights, evaluation, rows of the wrong kind."""
    args = [
        "task=grpo",
        "adapter=lora",
        "adapter.dropout=0.1",
        "task.reward_weights=[1,2]",
        "task.reward_options={format: {pattern: a}}",
        "evaluation.fraction=0.1",
        "checkpoint.keep_best=1",
    ]
    assert main(["plan", *args, "data.stream=true", "evaluation.batches=1"]) == 2
    said = capsys.readouterr().err
    for part in (
        "adapter.dropout=0.1: answers are drawn without",
        "task.rewards is empty",
        "has 2 numbers for 0",
        "is for format",
        "checkpoint.keep_best=1 goes by the loss",
        "data.stream=true",
    ):
        assert part in said
    turns = ["task.max_turns=2", "task.environment_options={limmit: 3}"]
    assert main(["plan", "task=grpo", "task.rewards=[exact]", *turns]) == 2
    assert "task.max_turns, task.environment_options: only a conversation" in capsys.readouterr().err
    assert main(["plan", "task=grpo", "task.rewards=[exact]", "task.environment=tests.rollouts.test_turns:parity", *turns]) == 2
    assert "there is no task.environment_options.limmit; it has no parameters" in capsys.readouterr().err
    assert main(["plan", "task=grpo", "task.kind=sft", "task.rewards=[exact]"]) == 2
    assert "task.kind=sft with task.learn=grpo, which learns from prompt" in capsys.readouterr().err
