"""Signals and the time limit: the run ends with the right exit code and one line, and can go on later."""

import signal
import time

import pytest

from tests.faults.runs import ENDLESS, EVEN, check_stopped, last_step, numbers

pytestmark = pytest.mark.gloo

CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138}


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["training", "saving"])
def test_a_signal_saves_the_step_and_the_run_goes_on_with_the_same_bits(start, undisturbed, some, where):
    """All ranks finish the same step and save it; the resumed run repeats the numbers of one that nothing disturbed."""
    every = {"training": "null", "saving": "1"}[where]
    for name in some(list(CODES)):
        run = start(*ENDLESS, f"checkpoint.every={every}", name=name)
        run.until_training()
        if where == "saving":
            run.until_saving()
        run.process.send_signal(signal.Signals[name])
        check_stopped(run, CODES[name], saved=True)
        assert "stopped by " + name in run.printed
        steps = last_step(run.run_dir) + 5
        again = start(*EVEN, f"steps={steps}", name=name)
        assert again.end() == 0, again.printed
        assert numbers(again.run_dir) == undisturbed(steps)


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["compile", "start-up"])
def test_before_the_first_step_there_is_nothing_to_save(start, some, where):
    """While the program is compiled and while ranks start, a signal ends the run at once."""
    for name in some(list(CODES)):
        run = start(*ENDLESS, *(["compile_cache=null"] if where == "compile" else []), name=name)
        if where == "compile":
            run.until(lambda run=run: (run.run_dir / "run.lock").exists())
        else:
            run.until(lambda run=run: "prepared in" in run.printed)
        run.process.send_signal(signal.Signals[name])
        check_stopped(run, CODES[name], saved=False)


def test_a_signal_stops_a_sweep(start, some):
    """The job that trains is saved; the next one never starts."""
    for name in some(list(CODES)):
        run = start("-m", "optimizer.lr=1e-3,2e-3", *ENDLESS, "checkpoint.every=null", name=name)
        run.until(lambda run=run: any(place.step > 2 for place in run.places()))
        ranks = run.ranks()
        run.process.send_signal(signal.Signals[name])
        assert run.end() == CODES[name], run.printed
        assert "Traceback" not in run.printed
        assert run.printed.splitlines()[-1].startswith(f"stopped by {name}")
        run.check_nothing_left(ranks)
        assert "--- job 1" not in run.printed


def test_a_time_limit_before_the_first_step(start):
    """A run whose time is over before its first step saves nothing, and ends with 124."""
    run = start(*ENDLESS, "time_limit=1s")
    check_stopped(run, 124, saved=False)
    assert "stopped by time_limit" in run.printed


@pytest.mark.full("it trains for as long as it is told to; a signal in the broad tier ends a run in the same way")
def test_a_time_limit(start):
    """A run whose time is over saves its last step, and ends with 124."""
    run = start(*ENDLESS, "time_limit=0h0m30s", "checkpoint.every=null")
    run.until_training()
    check_stopped(run, 124, saved=True)
    assert "stopped by time_limit" in run.printed


@pytest.mark.full("starts three runs")
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_a_signal_after_the_last_step(start, delay_s):
    """Ranks that are about to end are not taken for lost ones: the run is stopped, and nothing is missing but the export."""
    run = start("steps=2")
    run.until((run.run_dir / "checkpoints" / "step_00000002").exists)
    time.sleep(delay_s)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143, run.printed
    assert "all steps are done" in run.printed.splitlines()[-1]
    assert "Traceback" not in run.printed


@pytest.mark.full("a signal in the broad tier goes the same way")
def test_a_second_sigint_stops_at_once(start):
    """Two SIGINT in a row: the run is over within seconds, and says what is lost."""
    run = start(*ENDLESS, "checkpoint.every=null")
    run.until_training()
    ranks = run.ranks()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 130
    assert "Traceback" not in run.printed
    run.check_nothing_left(ranks)
