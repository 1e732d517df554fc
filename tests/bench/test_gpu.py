"""The one command for a GPU: its parts are started, timed, and reported, whatever they do."""

import re
import signal
import sys

import pytest

from bench import gpu
from bench._machine import ROOT


def test_parts_are_reported(tmp_path, monkeypatch, capsys):
    """A part that passes, one that fails and one that hangs: each has its log and its verdict, and the last ends in time."""
    said = "print('begun'); time.sleep(60)"
    interrupted = f"import time\ntry: {said}\nexcept KeyboardInterrupt: print('found so far')"
    scripts = {"numerics": "print('fine')", "kernels": "raise SystemExit(3)", "step": interrupted, "gluon": "print(1)"}
    monkeypatch.setattr(gpu, "_command", lambda part, *_: [sys.executable, "-c", scripts[part]])
    monkeypatch.setattr(gpu, "SHARES", gpu.SHARES | {"step": 0.2})
    monkeypatch.setattr(gpu, "GRACE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(tmp_path), "--seconds", "10"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's background jobs find it
    assert gpu.main() == 1
    shown = capsys.readouterr().out
    assert "numerics: passed" in shown
    assert "kernels: exit code 3" in shown
    assert "step: out of time" in shown
    assert shown.endswith("failed: kernels, step\n")
    assert (tmp_path / "numerics.txt").read_text() == "fine\n"
    assert re.fullmatch(r"begun\nfound so far\n\nstopped after \d+ s\n", (tmp_path / "step.txt").read_text())


def test_a_part_that_does_not_let_itself_be_interrupted_is_killed(tmp_path, monkeypatch):
    """What it printed stays."""
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('begun'); time.sleep(60)"
    monkeypatch.setattr(gpu, "_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(gpu, "GOODBYE_S", 0.2)
    assert not gpu._run("step", tmp_path, "", 1.0 - gpu.GRACE_S)
    assert (tmp_path / "step.txt").read_text().startswith("begun\n\nstopped")


def test_programs_and_the_table_come_first(tmp_path):
    """Then the other files of kernels, each once, since pytest may forget the order of files that overlap with a folder."""
    files = [word for word in gpu._command("numerics", tmp_path, "", 1.0) if word.endswith(".py")]
    assert files[:2] == ["tests/runtime/test_gpu.py", "tests/kernels/test_table.py"]
    assert len(set(files)) == len(files) > 10 and all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("part", gpu.SHARES)
def test_commands_exist(part, tmp_path):
    """Every part's command is a module that answers --help, or pytest."""
    command = gpu._command(part, tmp_path, "abc", 100.0)
    assert command[:2] == [sys.executable, "-m"]
    assert command[2] in ("pytest", "bench.kernels", "bench.step")
