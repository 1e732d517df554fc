"""`mpar plan`: no process, no weights."""

import re

from mpar.cli import _main
from tests.cli.conftest import SMALL


def test_plan_prints_everything(capsys, tmp_path):
    """Program, collectives, memory and time are on the screen; the whole program is in the file."""
    assert _main.main(["plan", *SMALL, f"plan.out={tmp_path}/all.txt", "plan.lines=6", "plan.rank=1"]) == 0
    text = capsys.readouterr().out
    assert "rank 1 of 2" in text
    assert re.search(r"\.\.\. \d+ more", text)
    assert re.search(r"all_gather +│ tp +│ 2 +│ forward", text)
    assert all(name in text for name in ("cpu", "h100", "h200", "verified"))
    lines = (tmp_path / "all.txt").read_text(encoding="utf-8").splitlines()
    assert [int(line[:4]) for line in lines[1:]] == list(range(len(lines) - 1))


def test_plan_of_16384_ranks(mpar):
    """Llama 405B, 126 layers, on 16,384 ranks: verified, with bytes of a rank, in less than 4 GiB."""
    done = mpar("plan", "model=llama3_405b", "strategy=zero3_tp", "mesh.fsdp=2048", "mesh.tp=8")
    assert done.returncode == 0, done.stderr
    assert "16,384 ranks" in done.stdout
    assert "backward layers.0" in done.stdout or "layers.125" in done.stdout
    taken = re.search(r"this process took ([\d.]+) (MiB|GiB)", done.stderr)
    assert taken is not None
    assert float(taken[1]) * (1 if taken[2] == "MiB" else 1024) < 4096
