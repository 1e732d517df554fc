"""Real processes: four ranks on gloo against one rank, against the simulator, and against the fewest messages possible."""

import functools
import pathlib
from collections import Counter

import pytest
import torch

from tests.gloo_training import assert_bits_equal, launch, simulate
from tests.runtime.gloo_worker import BATCHES, CASES, make_params, make_program
from tests.tiers import values_asked_for

pytestmark = pytest.mark.gloo
make_program = functools.cache(make_program)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What rank 0 found for the cases of the selected tests, from one launch of four processes."""
    worker = pathlib.Path(__file__).with_name("gloo_worker.py")
    programs = {case: make_program(case) for case in values_asked_for(request, CASES)}
    return launch(worker, tmp_path_factory.mktemp("gloo"), programs)


@pytest.fixture(scope="module")
def one_rank():
    """Losses of the same 20 steps on one rank, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program = make_program("one")
    state = program.init_state(make_params("one"))
    run, losses = program.bind(), []
    for batch in BATCHES:
        state, metrics = run(state, batch)
        losses.append(metrics["loss"])
    torch.set_num_threads(threads)
    return torch.stack(losses)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_one_rank(case, runs, one_rank):
    """20 steps with clipping give the losses of one rank to 1e-6, relative, in float32."""
    assert ((runs[case]["losses"] - one_rank).abs() / one_rank).max() <= 1e-6


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "case",
    ["fsdp2_tp2_sp", "fsdp4", "fsdp4_hidden", "dp4", "dp4_hidden", "tp4_sp", "tp4_sp_hidden", "tp2_sp_paired", "tp4"],
)
def test_bits_equal_the_simulation(case, runs):
    """Losses, gradient norms and the parameters and optimizer state at the end are the simulator's, bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program = make_program(case)
    expected, state = simulate(program, program.init_state(make_params(case)), BATCHES)
    torch.set_num_threads(threads)
    assert_bits_equal(runs[case], program, expected, state)


def count(messages, axis):
    """How often each collective over `axis` ran in one step."""
    return Counter(op for op, axes, _, _ in messages if axes == (axis,))


@pytest.mark.parametrize("case", ["tp4_sp"])
def test_tensor_and_sequence_parallel_messages(case, runs):
    """Per block 2 all_gathers and 2 reduce_scatters forward and the same backward; outside: the embedding's reduce_scatter and
    its all_gather backward, the head's all_gather and reduce_scatter, two of the loss, one of the norm gains, one of the norm."""
    counts = count(runs[case]["messages"], "tp")
    assert counts == {"all_gather": 4 * NUM_LAYERS + 2, "reduce_scatter": 4 * NUM_LAYERS + 2, "all_reduce": 4}


@pytest.mark.parametrize(("again", "kept"), [("tp4_sp_again", "tp4_sp")])
def test_gathered_inputs_may_be_gathered_again(again, kept, runs):
    """Where gathered activations are not kept, the backward of a block has 4 all_gathers; the head's is one with its forward."""
    counts, counts_kept = (count(runs[case]["messages"], "tp") for case in (again, kept))
    assert counts["all_gather"] - counts_kept["all_gather"] == 2 * NUM_LAYERS
    assert counts["reduce_scatter"] == counts_kept["reduce_scatter"]


@pytest.mark.parametrize("case", ["tp4"])
def test_tensor_parallel_messages(case, runs):
    """Without SP: 2 all_reduces forward and 2 backward per block; outside: the embedding's, the head's input, two of the loss and
    one of the norm. Nothing else."""
    assert count(runs[case]["messages"], "tp") == {"all_reduce": 4 * NUM_LAYERS + 5}


@pytest.mark.parametrize(("case", "gathers"), [("fsdp4_units", 2), ("fsdp4_kept", 1)])
def test_zero3_messages(case, gathers, runs):
    """One all_gather per parameter forward, one backward (none when kept), one reduce_scatter; besides that three short
    all_reduces: of the batch's weight, of the loss and of the squared norms. The head's are kept: its backward is next."""
    messages = runs[case]["messages"]
    program = make_program(case)
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
