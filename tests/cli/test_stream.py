"""A run that reads its data while it trains: it learns, and goes on after an interruption as if nothing had been."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from mpar.cli._worker import _check_same
from mpar.errors import DataError
from mpar.train import read_metrics
from tests.cli.conftest import SMALL, environment
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.gloo
STEPS = 60


@pytest.fixture
def arguments(tmp_path):
    """A run on two blended sources, with damaged rows; blocks are so small that a run reads all rows several times."""
    for name, count in (("long", 90), ("short", 30)):
        rows = [json.dumps({"query": f"{name} {n}?", "response": name * (1 + n % 3)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*rows[:7], "{damaged", *rows[7:]]) + "\n")
    return [
        *SMALL, "data=jsonl", "data.sources=[long.jsonl,short.jsonl]", "data.weights=[0.6,0.4]", "data.stream=true",
        "data.shuffle_rows=40", f"steps={STEPS}", "optimizer.lr=0.02", "checkpoint={every: 20, keep: null}",
    ]  # fmt: skip


def test_an_interrupted_run_reads_on_where_it_stopped(arguments, mpar, tmp_path):
    """Stopped somewhere by Ctrl-C on two ranks and continued on one, with other workers, it has been given the rows of the run
    that was not stopped; its losses are the same; and the model learns. It does not go on with other rows in a source."""
    whole = mpar("train", *arguments, "mesh=dp2", "strategy=ddp", "run_dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert "data of a stream, so far: 40 of 42 rows used (40 query/response; 24 of long.jsonl; 16 of short.jsonl)" in whole.stderr
    command = [sys.executable, "-m", "mpar", "train", *arguments, "mesh=dp2", "strategy=ddp", "data.workers=0", "run_dir=stopped"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + PATIENCE_S
        while len(read_metrics(tmp_path / "stopped" / "metrics.jsonl")) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=PATIENCE_S)
    reached = len(read_metrics(tmp_path / "stopped" / "metrics.jsonl"))
    assert run.returncode == 130 and 5 <= reached < STEPS
    done = mpar("train", *arguments, "mesh=one", "strategy=ddp", "run_dir=stopped")
    assert done.returncode == 0, done.stderr
    expected, found = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    names = [name for name in expected[-1] if name.startswith(("rows/", "tokens/", "left_out/"))]
    assert len(names) == 5 and expected[-1]["rows/short.jsonl"] > 60  # twice all of them, at least
    for name in ("step", "tokens", *names):
        assert [record.get(name) for record in found] == [record.get(name) for record in expected]
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in expected], rel=1e-3)
    assert expected[-1]["loss"] < 0.5 * expected[0]["loss"]
    listed = [(tmp_path / name / "malformed.jsonl").read_text() for name in ("whole", "stopped")]
    assert listed[0] == listed[1] and len(listed[0].splitlines()) >= expected[-1]["left_out/malformed"]
    (tmp_path / "short.jsonl").write_text('{"query": "q", "response": "another"}\n')
    refused = mpar("train", *arguments, "steps=70", "mesh=one", "strategy=ddp", "run_dir=stopped")
    assert refused.returncode == 1
    assert "short.jsonl: other rows are in its files" in refused.stderr and "long.jsonl: " not in refused.stderr


@pytest.mark.parametrize(
    ("data", "refusal"),
    [("aa", None), ("ab", "the ranks read different data"), ("bb", "the data changed while the run began")],
)
def test_all_ranks_compare_their_data(data, refusal):
    """Each rank is refused if any rank has other data, and if all have other data than were prepared."""
    sent = []
    for rank_data in data:
        with contextlib.suppress(DataError):
            _check_same(rank_data, "a", lambda values: sent.append(values) or values, mock.Mock())
    highest = [max(values) for values in zip(*sent, strict=True)]
    for rank_data in data:
        with contextlib.nullcontext() if refusal is None else pytest.raises(DataError, match=refusal):
            _check_same(rank_data, "a", lambda _: highest, mock.Mock())
