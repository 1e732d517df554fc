"""Real processes: four ranks on gloo that share sequences and experts, against one rank and against the simulator."""

import pathlib
import subprocess
import sys
from collections import Counter

import pytest
import torch

from mpar.shards import shard
from tests.patience import PATIENCE_S
from tests.program.context_worker import CASES, SHAPE, make_batches, make_params, make_program

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, messages and shards of every case, from one launch of four processes."""
    out = tmp_path_factory.mktemp("gloo") / "results.pt"
    worker = pathlib.Path(__file__).with_name("context_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(worker), str(out)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order, as in the processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_rank(case, runs):
    """20 steps with clipping: losses and norms of one rank, to 1e-10 in float64, to 1e-6 in float32 with forced routing."""
    program = make_program(case, one_rank=True)
    run, state = program.bind(), program.init_state(make_params(case))
    bound = 1e-10 if CASES[case][2] == torch.float64 else 1e-6
    for batch, loss, norm in zip(make_batches(), runs[case]["losses"], runs[case]["norms"], strict=True):
        state, metrics = run(state, batch)
        assert abs(loss - metrics["loss"]) <= bound * metrics["loss"]
        assert abs(norm - metrics["grad_norm"]) <= 10 * bound * metrics["grad_norm"]


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "ring", "two_levels", "slices"])
def test_bits_equal_the_simulation(case, runs):
    """Losses, gradient norms and the state at the end are the simulator's, bit for bit."""
    program = make_program(case)
    state, losses, norms = program.init_state(make_params(case)), [], []
    for batch in make_batches():
        state, metrics = program.simulate(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    assert torch.equal(runs[case]["losses"], torch.stack(losses))
    assert torch.equal(runs[case]["norms"], torch.stack(norms))
    for leaf in program.state_out:
        assert torch.equal(runs[case]["leaves"][leaf.path], shard(state.leaves[leaf.path], leaf.spec, program.mesh, 0)), leaf.path


@pytest.mark.parametrize(("case", "shifts"), [("ring", 3), ("two_levels", 1), ("deepseek_v3", 1)])
def test_ring_messages(case, shifts, runs):
    """Of each of two layers: once round forward; keys and their gradients once round backward. Bytes as the program says."""
    sent = [(op, axes, size) for op, axes, _, size in runs[case]["messages"] if op == "shift"]
    said = [(use.op, use.axes, use.bytes) for use in make_program(case).collectives() if use.op == "shift"]
    assert sent == said and len(sent) == 2 * 3 * shifts


def test_messages_by_heads(runs):
    """Ulysses: four all_to_alls forward and four backward in each of two layers."""
    assert Counter(op for op, *_ in runs["all_to_all"]["messages"])["all_to_all"] == 2 * (4 + 4)


def test_messages_of_experts(runs):
    """In each of two layers rows go twice each way and their numbers once; all rows that leave the four ranks are all slots."""
    counts = Counter(op for op, *_ in runs["qwen3_moe"]["messages"])
    assert counts["exchange_rows"] == 2 * 4 and counts["all_to_all"] == 2
    slots = SHAPE[0] * SHAPE[1] // 4 * 2
    sizes = [size for op, _, _, size in runs["qwen3_moe_forced"]["messages"] if op == "exchange_rows"]
    assert sizes == [slots * 16 * 4] * 8
