"""What the system refuses is a message and an exit code, never a traceback."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpar.cli import main as command_line
from mpar.cli._go_on import after_stop
from mpar.cli._run_problems import compose_run
from tests.cli.conftest import environment
from tests.processes import PATIENCE_S


def run_shell(line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """A line for bash, in which MPAR is the command."""
    line = "set -o pipefail; " + line.replace("MPAR", f"{sys.executable} -m mpar")
    how = {"cwd": folder, "env": environment() | variables, "timeout": PATIENCE_S}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, **how)


def test_a_refusal_of_the_system_is_told(capsys, monkeypatch, tmp_path):
    """A full disk, wherever it is noticed: what was done, what the system says, and of which file."""

    def full(args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr("mpar.cli._plan.main", full)
    assert command_line.main(["plan"]) == 1
    text = capsys.readouterr().err
    assert f"the system refused: No space left on device: {tmp_path}" in text
    assert "Traceback" not in text


def test_a_user_without_a_home_is_told(capsys, monkeypatch):
    """Some containers have neither HOME nor an entry for the user."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert command_line.main(["plan"]) == 2
    assert "neither XDG_CACHE_HOME nor HOME is set" in capsys.readouterr().err


def test_a_working_directory_that_is_gone_is_told(tmp_path):
    """Relative paths mean nothing there."""
    done = run_shell("mkdir gone && cd gone && rmdir ../gone && MPAR export run_dir=run", tmp_path)
    assert done.returncode == 2
    assert "the working directory does not exist any more" in done.stderr and "Traceback" not in done.stderr


def test_tensors_lie_in_large_pages():
    """torch takes them where the system has them on demand."""
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    code = (
        "from mpar.cli import main; main.main(['data', '--help']); import torch; x = torch.ones(2**24); "
        "print([line for line in open('/proc/self/smaps_rollup') if 'AnonHuge' in line][0].split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    is_offered = offered.exists() and "[never]" not in offered.read_text()
    assert (int(done.stdout.split()[-1]) > 0) == is_offered  # how many there are free is up to the system


def test_nobody_reads_the_output_any_more(tmp_path):
    """`| head` ends the command as it ends others, in silence."""
    done = run_shell("MPAR train --help | true", tmp_path)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_screen_that_lacks_letters(tmp_path):
    """What its encoding lacks is shown as an escape."""
    done = run_shell("MPAR plan steps=\u4f60", tmp_path, PYTHONIOENCODING="ascii")
    assert "\\u4f60" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "run_dir=RUN"),
        (["resume=never"], "run_dir=RUN resume=auto"),
        (["resume=weights"], "run_dir=RUN resume.state=all"),
        (["checkpoint.optimizer_state=false"], "run_dir=RUN resume=weights"),
    ],
    ids=str,
)
def test_how_to_go_on(overrides, words, monkeypatch, tmp_path):
    """The same command would begin as it began: what it needs besides is said. Of a job of a sweep, the sweep goes on."""
    config, _ = compose_run([*overrides, f"run_dir={tmp_path}"], None, lambda config: [])
    monkeypatch.setattr("mpar.checkpoint.latest", lambda folder: folder / "step_00000002")
    assert after_stop(config).endswith(f"run the same command with {words.replace('RUN', str(tmp_path))}")
    assert f"run_dir={tmp_path / 'sweep'}" in after_stop(config, tmp_path / "sweep")
