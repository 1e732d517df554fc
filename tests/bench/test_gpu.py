"""The one command for a GPU: its parts are started, timed, and reported, whatever they do."""

import io
import sys

import pytest

from bench import gpu
from bench.kernels._case import Case


def test_parts_are_reported(tmp_path, monkeypatch, capsys):
    """A part that passes, one that fails and one that hangs: each has its log and its verdict, and the last ends in time."""
    scripts = {"numerics": "print('fine')", "kernels": "raise SystemExit(3)", "step": "import time; time.sleep(60)"}
    monkeypatch.setattr(gpu, "_command", lambda part, *_: [sys.executable, "-c", scripts[part]])
    monkeypatch.setattr(gpu.subprocess, "run", _impatient(gpu.subprocess.run))
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(tmp_path), "--seconds", "10"])
    assert gpu.main() == 1
    shown = capsys.readouterr().out
    assert "numerics: passed" in shown
    assert "kernels: exit code 3" in shown
    assert "step: out of time" in shown
    assert shown.endswith("failed: kernels, step\n")
    assert (tmp_path / "numerics.txt").read_text() == "fine\n"
    assert "stopped after" in (tmp_path / "step.txt").read_text()


def _impatient(run):
    """`run` that waits two seconds at most."""
    return lambda *args, timeout, **options: run(*args, timeout=min(timeout, 2), **options)


@pytest.mark.parametrize("part", gpu.SHARES)
def test_commands_exist(part, tmp_path):
    """Every part's command is a module that answers --help, or pytest."""
    command = gpu._command(part, tmp_path, "abc", 100.0)
    assert command[:2] == [sys.executable, "-m"]
    assert command[2] in ("pytest", "bench.kernels", "bench.step")


def test_a_wrong_case_does_not_stop_the_others(monkeypatch):
    """What raises is counted, with its traceback, and the rest is checked."""

    def fail(make):
        raise AssertionError("other bits")

    cases = [Case("bad", ("swiglu_fwd",), fail), Case("good", ("swiglu_fwd",), lambda make: None)]
    monkeypatch.setattr(gpu, "all_cases", lambda: cases)
    out = io.StringIO()
    assert gpu.check_table(out, "cpu") == 1
    assert "WRONG  bad" in out.getvalue()
    assert "other bits" in out.getvalue()
    assert "right  good" in out.getvalue()
    assert out.getvalue().endswith("1 of 2 cases are right\n")
