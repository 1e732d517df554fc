"""Rows in slices on the command line: plans, a run on processes, what is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from mpar.cli import main as command_line
from mpar.train import read_metrics
from tests.cli.conftest import SMALL, Run
from tests.cli.test_bad_input import refused

ONE = ["mesh=one", "strategy=ddp"]
CP2 = ["mesh=cp2", "strategy=zero3", "strategy.context_parallel=ring"]
ROUTED = [*ONE, "model=tiny_qwen3_moe", "schedule.num_slices=2"]
DYNAMIC = "+model.config.rope_scaling={rope_type: dynamic, factor: 2.0}"
WHOLE = "num_slices=1 (schedule.num_slices in a configuration) leaves rows whole"
REFUSED = {
    "slices that are not equal": (
        [*ONE, "schedule.num_slices=3"],
        ["cannot cut rows of 256 positions into 3 equal slices", "schedule.num_slices", "divides 256"],
    ),
    "no slice": ([*ONE, "schedule.num_slices=0"], ["schedule.num_slices=0: must be at least 1"]),
    "a word": ([*ONE, "schedule.num_slices=two"], ["schedule.num_slices='two': must be a whole number"]),
    "a misspelt key": ([*ONE, "schedule.slices=2"], ["did you mean schedule.num_slices?"]),
    "ranks that do not divide a slice": (
        [*CP2, "data.seq_len=120", "schedule.num_slices=4"],
        [
            "a sequence of 120 positions: 2 ranks share each of the 4 slices of a sequence, in two parts each",
            "a multiple of 16",
            "Use 128 (8 positions of padding) or 112.",
        ],
    ),
    "documents that turn by the length of a row": (
        [*ONE, "model=tiny_llama", DYNAMIC, "schedule.num_slices=2"],
        ["this RoPE depends on the last position of a row, which its slices do not know.", WHOLE],
    ),
    "losses of routers": (ROUTED, ["look at all tokens of a microbatch, because of aux_loss=0.001.", "(model.router)", WHOLE]),
    "capacities": (
        [*ROUTED, "model.router.aux_loss=0", "model.router.capacity_factor=1.5", "model.router.kind=sinkhorn"],
        ["because of kind=sinkhorn, capacity_factor=1.5."],
    ),
}
LONG = ["experiment=llama3_8b_1m", "model.config.num_hidden_layers=2", "strategy.context_parallel=ring", "lines=1"]


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(case, capsys):
    """The message has the facts that disagree, and a way out by its key."""
    args, told = REFUSED[case]
    text = refused(capsys, "plan", *args)
    assert all(words in text for words in told), text


@pytest.mark.parametrize(
    "how",
    [
        [*ROUTED, "model.router.aux_loss=0"],
        [*ONE, "model=tiny_mamba2", "data.seq_len=128", "schedule.num_slices=2"],
    ],
    ids=["routers without losses", "scans"],
)
def test_is_planned(how, capsys):
    """What was refused names a way that works; scans go on from the state that they left."""
    assert command_line.main(["plan", *how, "lines=1"]) == 0
    assert "2 slices of 64 positions" in capsys.readouterr().out


def test_the_key_is_listed(capsys):
    """Help shows it with its default."""
    assert command_line.main(["train", "--help"]) == 0
    assert re.search(r"schedule.num_slices=1 +slices into which the sequences", capsys.readouterr().out)


def test_what_a_plan_says(capsys):
    """How rows are cut, and which positions of each slice a rank has: zigzag within a slice."""
    assert command_line.main(["plan", *CP2, "data.batch_size=8", "schedule.num_slices=4", "lines=1", "rank=1"]) == 0
    text = capsys.readouterr().out
    assert "batch       8 sequences of 256 positions in 1 microbatch, 4 slices of 64 positions\n" in text
    assert "; rank 1 has 32 positions of each slice, zigzag: 16 to 47 of the first\n" in text
    assert command_line.main(["plan", *CP2, "data.batch_size=8", "schedule.num_microbatches=2", "lines=1"]) == 0
    text = capsys.readouterr().out
    assert "in 2 microbatches\n" in text
    assert "; rank 0 has 128 positions, zigzag: 0 to 63 and 192 to 255\n" in text
    both = ["schedule.num_microbatches=2", "schedule.num_slices=4"]
    assert command_line.main(["plan", *CP2, "data.batch_size=8", *both, "strategy.sequence=contiguous", "lines=1"]) == 0
    text = capsys.readouterr().out
    assert "in 2 microbatches, 4 slices each, of 64 positions\n" in text
    assert "; rank 0 has 32 positions of each slice, 0 to 31 of the first\n" in text


def planned(capsys: pytest.CaptureFixture, *how: str) -> tuple[float, float]:
    """GiB at the peak and on the host, of the plan of two layers of Llama 3.1 8B on 1,048,576 tokens and 8 ranks."""
    assert command_line.main(["plan", *LONG, "recompute.offload=true", *how]) == 0
    found = re.search(r"peak ([\d.]+) GiB, .*?([\d.]+) GiB more on the host", capsys.readouterr().out)
    assert found is not None
    return float(found[1]), float(found[2])


def test_memory_falls_with_slices(capsys):
    """The peak is lower in 4 slices; the host has more: keys and values of both layers, and what the backward of a layer gives
    to the slices before its last."""
    (peak, host), (sliced_peak, sliced_host) = planned(capsys), planned(capsys, "schedule.num_slices=4")
    assert sliced_peak < 0.7 * peak
    entering = 2**20 / 8 * 4096 * 2 / 2**30  # bfloat16, of a rank: what enters a layer, and a gradient of it
    keys_and_values = 2**20 / 8 * (8 + 8) * 128 * 2 / 2**30
    assert host == pytest.approx(2 * entering, abs=0.1)
    assert sliced_host == pytest.approx(2 * entering + 2 * keys_and_values + 3 / 4 * entering, abs=0.1)


def test_schedules_are_compared_in_slices(capsys):
    """Each schedule is tried with slices: the same tokens of a step, less memory; the title says how many there are."""
    pp2 = ["mesh=pp2", "strategy=ddp", "data.batch_size=8", "recompute=full", "compare=[one_f_one_b]"]
    peaks = []
    for how, title in ((["schedule.num_slices=4"], "4 microbatches, 4 slices\n"), ([], "4 microbatches\n")):
        assert command_line.main(["plan", *pp2, *how]) == 0
        text = capsys.readouterr().out
        assert title in text
        row = next(line for line in text.splitlines() if "one_f_one_b" in line)
        peaks.append(float(re.findall(r"│ ([\d.]+) MiB", row)[0]))
    assert peaks[0] < peaks[1]


def test_slices_in_a_diff(capsys):
    """Forwards and backwards of each segment are counted by slice."""
    assert command_line.main(["plan", *SMALL, *CP2, "diff=[schedule.num_slices=4]", "lines=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("with schedule.num_slices=4\ninstructions ")
    assert re.search(r"forward +-2 +\+8\n", text)  # the embedding and a layer; the head is forward and backward at once
    assert re.search(r"backward +-3 +\+12\n", text)


def numbers(run_dir: Path) -> np.ndarray:
    """(steps, 3): loss, loss of the evaluation, gradient norm."""
    records = read_metrics(run_dir / "metrics.jsonl")
    return np.array([[record[key] for key in ("loss", "eval_loss", "grad_norm")] for record in records])


@pytest.mark.full("its runs take 30 s; tests/program/test_slices.py compares steps")
@pytest.mark.gloo
def test_a_run_in_slices_is_the_run_without(mpar: Run, tmp_path):
    """From a checkpoint that was written without slices, two steps in slices; from one of these, one without. Losses, gradient
    norms and evaluations are those of the run without, to 1e-5: sums are taken in another order, in float32, and AdamW, whose
    first steps are as long for small gradients as for large ones, carries that on.
    """
    how = ["train", *SMALL, *CP2, "steps=3", "task.chat=[]", "progress=false", "checkpoint={every: 1, keep: null}"]
    how += ["evaluation={every: 1, fraction: 0.1, batches: 1}", "recompute=full"]
    runs = [
        (["run_dir=whole"], "from the start"),
        (
            ["run_dir=sliced", "resume=whole/checkpoints/step_00000001", "schedule.num_slices=2", "recompute.offload=true"],
            "on from whole/checkpoints/step_00000001",
        ),
        (["run_dir=after", "resume=sliced/checkpoints/step_00000002"], "on from sliced/checkpoints/step_00000002"),
    ]
    for args, begin in runs:
        done = mpar(*how, *args)
        assert done.returncode == 0, done.stderr
        assert begin in done.stderr
    whole, sliced, after = (numbers(tmp_path / name) for name in ("whole", "sliced", "after"))
    assert len(whole) == 3
    assert sliced == pytest.approx(whole[1:], rel=1e-5)
    assert after == pytest.approx(whole[2:], rel=1e-5)
