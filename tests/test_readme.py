"""The Python and the commands in README.md run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpar.cli import main as command_line
from mpar.cli._arguments import read_arguments
from mpar.cli._compose import check_overrides
from mpar.train import TrainConfig
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:\$ )?(?:torchrun .* -m )?mpar ((?:train|plan)\b(?:.*\\\n)*.*)$", README, re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path):
    """Each block runs by itself in an empty folder, without a warning."""
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BLOCKS[number]}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks():
    """The README has Python to run."""
    assert BLOCKS


@pytest.mark.cases(1)
@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line, tmp_path, monkeypatch):
    """`mpar plan` runs as it stands, and plans what `mpar train` would run; a sweep or a folder of one's own is only read."""
    monkeypatch.chdir(tmp_path)
    command, *args = shlex.split(line.replace("\\\n", " "), comments=True)
    if "-m" in args or any("DIR" in arg or ".jsonl" in arg for arg in args):
        (tmp_path / "DIR" / "experiment").mkdir(parents=True)
        (tmp_path / "DIR" / "experiment" / "mine.yaml").touch()
        arguments = read_arguments(args)
        check_overrides("train", TrainConfig, arguments.overrides, arguments.user_dir)
        return
    (tmp_path / "order.csv").write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n", encoding="utf-8")
    assert command in ("train", "plan")
    assert command_line.main(["plan", *args]) == 0


def test_there_are_commands():
    """The README has commands to run."""
    assert any(line.startswith("train") for line in COMMANDS)
    assert any(line.startswith("plan") for line in COMMANDS)
