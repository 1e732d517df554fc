"""Real processes: four ranks on gloo against one rank, against the simulator, and against the fewest messages possible."""

import pathlib
import subprocess
import sys
from collections import Counter

import pytest
import torch

from mpar.shards import shard
from tests.patience import PATIENCE_S
from tests.runtime.gloo_worker import CASES, make_batches, make_program

pytestmark = pytest.mark.gloo
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses, messages and shards of every case, from one launch of four processes."""
    out = tmp_path_factory.mktemp("gloo") / "results.pt"
    worker = pathlib.Path(__file__).with_name("gloo_worker.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(worker), str(out)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def one_rank():
    """Losses of the same 20 steps on one rank, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program, state = make_program("one")
    run, losses = program.bind(), []
    for batch in make_batches():
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    torch.set_num_threads(threads)
    return torch.stack(losses)


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_one_rank(case, runs, one_rank):
    """20 steps with clipping give the losses of one rank to 1e-6, relative, in float32."""
    assert ((runs[case]["losses"] - one_rank).abs() / one_rank).max() <= 1e-6


@pytest.mark.parametrize("case", ["fsdp2_tp2_sp", "fsdp4", "dp4", "tp4_sp", "tp4"])
def test_bits_equal_the_simulation(case, runs):
    """Losses, gradient norms and the parameters and optimizer state at the end are the simulator's, bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program, state = make_program(case)
    losses, norms = [], []
    for batch in make_batches():
        state, metrics = program.simulate(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    torch.set_num_threads(threads)
    assert torch.equal(runs[case]["losses"], torch.stack(losses))
    assert torch.equal(runs[case]["norms"], torch.stack(norms))
    for leaf in program.state_out:
        assert torch.equal(runs[case]["leaves"][leaf.path], shard(state.leaves[leaf.path], leaf.spec, program.mesh, 0)), leaf.path


def count(messages, axis):
    """How often each collective over `axis` ran in one step."""
    return Counter(op for op, axes, _, _ in messages if axes == (axis,))


def test_tensor_and_sequence_parallel_messages(runs):
    """Per block 2 all_gathers and 2 reduce_scatters forward and the same backward; outside: the embedding's reduce_scatter and
    its all_gather backward, the head's all_gather and reduce_scatter, two of the loss, one of the norm gains, one of the norm."""
    counts = count(runs["tp4_sp"]["messages"], "tp")
    assert counts == {"all_gather": 4 * NUM_LAYERS + 2, "reduce_scatter": 4 * NUM_LAYERS + 2, "all_reduce": 4}


def test_gathered_inputs_may_be_gathered_again(runs):
    """Where gathered activations are not kept, the backward of a block has 4 all_gathers; the head's is one with its forward."""
    again, kept = (count(runs[case]["messages"], "tp") for case in ("tp4_sp_again", "tp4_sp"))
    assert again["all_gather"] - kept["all_gather"] == 2 * NUM_LAYERS
    assert again["reduce_scatter"] == kept["reduce_scatter"]


def test_tensor_parallel_messages(runs):
    """Without SP: 2 all_reduces forward and 2 backward per block; outside: the embedding's, the head's input, two of the loss and
    one of the norm. Nothing else."""
    assert count(runs["tp4"]["messages"], "tp") == {"all_reduce": 4 * NUM_LAYERS + 5}


@pytest.mark.parametrize(("case", "gathers"), [("fsdp4_units", 2), ("fsdp4_kept", 1)])
def test_zero3_messages(case, gathers, runs):
    """One all_gather per parameter forward, one backward (none when kept), one reduce_scatter; besides that three short
    all_reduces: of the batch's weight, of the loss and of the squared norms. The head's are kept: its backward is next."""
    messages = runs[case]["messages"]
    program, _ = make_program(case)
    num_params = len(program.gradients)
    in_head = sum(path.startswith("head") for path in program.gradients)
    tensors = Counter()
    for op, _, count, _ in messages:
        tensors[op] += count
    in_embed = 1  # its backward needs no parameter
    assert tensors["all_gather"] == gathers * (num_params - in_head - in_embed) + in_head + in_embed
    assert tensors["reduce_scatter"] == num_params
    short = [(op, size) for op, _, _, size in messages if op == "all_reduce"]
    assert len(short) == 3 and all(size <= 4 * num_params for _, size in short)
