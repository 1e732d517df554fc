"""What the numbers of a step say: not finite, a spike, no gradient; and what a run does then."""

import functools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpar import checkpoint
from mpar.cli._compose import compose_config
from mpar.errors import CheckpointError, NumericsError
from mpar.program import NO_LIMITS, Program
from mpar.train import Progress, Rank, StepRecord, TrainConfig, Watch, load_data, make_setup, run_steps, start
from mpar.train._health import MIN_HISTORY, Health, Seen, judge
from mpar.train._saving import Saving
from mpar.train._stop import Stop
from mpar.train.compile import compile_program
from tests.train.conftest import SMALL

CPU = torch.device("cpu")
CALM = Seen(step=41, loss=2.0, grad_norm=1.0, microbatch_losses=(2.0, 2.0), weight=100.0, skipped=False)


def history(seed: int = 0, length: int = 40) -> Health:
    """Losses of 2 and norms of 1, with a deviation of 0.1."""
    generator = random.Random(seed)
    losses, norms = ([generator.gauss(mean, 0.1) for _ in range(length)] for mean in (2.0, 1.0))
    return Health(tuple(losses), tuple(norms))


@pytest.fixture
def settings(config):
    """A function that changes the configuration."""

    def change(**changes) -> TrainConfig:
        return replace(config, **changes)

    return change


def test_a_loss_that_is_not_finite_names_step_microbatch_and_tensor(config):
    """The first microbatch whose loss is not finite is named; a gradient norm alone is told apart."""
    nan = replace(CALM, step=12, loss=math.nan, microbatch_losses=(1.0, 2.0, math.nan, 3.0), skipped=True)
    with pytest.raises(NumericsError, match=r"loss is nan in step 12, first in microbatch 2 \(in 1 of 4\)") as raised:
        judge(config, Health(), nan, lambda: "x3.2, a result of `forward layers.1 mb2`")
    assert "; the first tensor that is not finite is x3.2, a result of `forward layers.1 mb2`." in str(raised.value)
    assert "The update of this step was left out" in str(raised.value)
    with pytest.raises(NumericsError, match=r"gradient norm is inf in step 41, while the loss is 2\.0"):
        judge(config, Health(), replace(CALM, grad_norm=math.inf, skipped=True), str)
    with pytest.raises(NumericsError, match=r"first in microbatch 1 \(in 2 of 3\)"):
        judge(config, Health(), replace(CALM, loss=math.inf, microbatch_losses=(2.0, math.inf, math.nan), skipped=True), str)
    assert judge(config, Health(), CALM, str) == ()


@pytest.mark.parametrize("changes", [{"loss": 2.9}, {"grad_norm": 1.9}], ids=["loss", "norm"])
def test_a_spike_is_told_skipped_or_stops(settings, changes):
    """Nine deviations are a spike, three are none; after one earlier spike it still is one; on_spike says what happens."""
    before, spike = history().after(replace(CALM, loss=900.0, grad_norm=900.0), 128), replace(CALM, **changes)
    small = replace(CALM, loss=2.3, grad_norm=1.3)
    assert judge(settings(), before, small, str) == ()
    (note,) = judge(settings(), before, spike, str)
    assert note.startswith("the ")
    assert note.endswith("the median of 41 steps")
    with pytest.raises(NumericsError, match=r"training stopped: the .* deviations above"):
        judge(settings(on_spike="stop"), before, replace(spike, skipped=True), str)
    (note,) = judge(settings(on_spike="skip"), before, replace(spike, skipped=True), str)
    assert note.endswith("the median of 41 steps; the update was skipped")
    limits = before.limits(6.0)
    assert (spike.loss > limits.loss or spike.grad_norm > limits.grad_norm) and small.loss < limits.loss


def test_there_are_no_spikes_without_a_history_or_a_spread():
    """Too few steps, or values that are all zero, have no limit; values that are all equal have one a little above them."""
    assert history(length=MIN_HISTORY - 1).limits(6.0) == NO_LIMITS
    assert Health((0.0,) * 40, (0.0,) * 40).limits(6.0) == NO_LIMITS
    assert Health((2.0,) * 40).limits(6.0).loss == pytest.approx(2.12)


def test_too_many_skips_in_a_row_stop(settings):
    """`spike.max_skips` steps in a row may be skipped, not one more; a step that is not skipped starts the count again."""
    config = settings(on_spike="skip")
    bad, health = replace(CALM, loss=math.nan, microbatch_losses=(math.nan,), skipped=True), history()
    for _ in range(config.spike.max_skips):
        assert len(judge(config, health, bad, str)) == 1
        health = health.after(bad, 128)
    with pytest.raises(NumericsError, match=r"11 steps in a row were skipped, and spike\.max_skips=10"):
        judge(config, health, bad, str)
    assert (health.skipped, health.after(CALM, 128).in_a_row, health.after(CALM, 128).skipped) == (10, 0, 10)
    assert len(health.losses) == 40


def test_the_cause_of_no_gradient_is_in_the_rewards_of_drawn_answers(settings):
    """Answers that are worth the same are told from answers without any reward."""
    drawn = settings(task=replace(settings().task, kind="prompt", learn="grpo"))
    for weight, cause in ((100.0, "all answers of each group were worth the same"), (0.0, "no answer has a reward")):
        (note,) = judge(drawn, Health(), replace(CALM, grad_norm=0.0, weight=weight, loss=0.0), str)
        assert f"exactly zero in step 41: {cause}" in note


def test_a_gradient_of_zero_is_told_once_with_its_cause(settings):
    """The cause is named; the next step with such a gradient says nothing more; on_zero_gradient=stop stops."""
    zero = replace(CALM, grad_norm=0.0)
    (note,) = judge(settings(), Health(), zero, str)
    assert "the gradient norm is exactly zero in step 41: 100 labels are trained on" in note
    (note,) = judge(settings(), Health(), replace(zero, weight=0.0, loss=0.0), str)
    assert "no label of this batch is trained on" in note
    assert judge(settings(), Health().after(zero, 128), zero, str) == ()
    with pytest.raises(NumericsError, match="exactly zero"):
        judge(settings(on_zero_gradient="stop"), Health(), zero, str)


def test_health_keeps_its_bits_in_a_checkpoint():
    """Through JSON and back it is the same; what is no health is refused; a checkpoint without one starts a new history."""
    health = replace(history(), skipped=3, in_a_row=1)
    extras = json.loads(json.dumps(Progress(41, 5, "data", 7, health).as_extras({})))
    assert Progress.from_extras(extras, Path("x")).health == health
    with pytest.raises(CheckpointError, match="health"):
        Progress.from_extras(extras | {"health": {"losses": ["a"], "grad_norms": [], "skipped": 0, "in_a_row": 0}}, Path("x"))
    del extras["health"]
    assert Progress.from_extras(extras, Path("x")).health == Health()


def alone(values: list[float]) -> list[float]:
    """The highest values of all ranks, if there is one rank."""
    return values


def trained(tmp_path: Path, steps: int, *overrides: str) -> list[StepRecord]:
    """The records of a run of one rank in this process, which goes on from the newest checkpoint in its folder."""
    options = [*SMALL, "mesh=one", "strategy=ddp", "data.seq_len=64", f"run_dir={tmp_path}", "checkpoint.every=null"]
    config, resolved = compose_config("train", TrainConfig, [*options, f"steps={steps}", *overrides])
    setup, records = make_setup(config), []
    program = compiled(overrides)
    (tmp_path / "data").mkdir(exist_ok=True, parents=True)
    data = load_data(setup, tmp_path / "data")
    with Watch(tmp_path / "place") as watch:
        run = program.bind(counter=watch, progress=watch)
        stop, saving = Stop(alone), Saving(config, resolved, program, 0, CPU, alone, watch, str)
        rank = Rank(setup, program, data.training, 0, CPU, run, watch, saving, stop, alone, data.items)
        state, progress = start(rank, checkpoint.latest(tmp_path / "checkpoints"))
        run_steps(rank, state, progress, records.append)
    return records


@functools.cache
def compiled(overrides: tuple[str, ...]) -> Program:
    """The program of `trained`, whose learning rate is constant and so the same for any number of steps."""
    options = [*SMALL, "mesh=one", "strategy=ddp", "data.seq_len=64", "steps=40", *overrides]
    return compile_program(make_setup(compose_config("train", TrainConfig, options)[0]))


def test_a_resumed_run_skips_the_same_steps(tmp_path):
    """With a limit so low that many steps are skipped, a run in two parts has the numbers of one that was not interrupted."""
    low = ("on_spike=skip", "spike.z=0.3", "spike.window=16", "spike.max_skips=100", "optimizer.lr_decay=constant")
    low += ("optimizer.min_ratio=null", "optimizer.warmup_ratio=null")
    whole = trained(tmp_path / "whole", 40, *low)
    parts = [*trained(tmp_path / "parts", 27, *low), *trained(tmp_path / "parts", 40, *low)]
    skipped = [record.skipped for record in whole]
    assert skipped[MIN_HISTORY - 1] == 0 and 0 < skipped[26] < skipped[-1] < 40 - MIN_HISTORY
    numbers = [(r.step, r.loss, r.grad_norm, r.lr, r.tokens, r.skipped, r.notes) for r in whole]
    assert numbers == [(r.step, r.loss, r.grad_norm, r.lr, r.tokens, r.skipped, r.notes) for r in parts]
