"""Real processes: four ranks on gloo that share sequences and experts, against one rank and against the simulator."""

import functools
import pathlib
from collections import Counter

import pytest
import torch

from tests.gloo_training import assert_bits_equal, launch, simulate
from tests.program.context_worker import BATCHES, CASES, SHAPE, make_params, make_program
from tests.tiers import values_asked_for

pytestmark = pytest.mark.gloo
make_program = functools.cache(make_program)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What rank 0 found for the cases of the selected tests, from one launch of four processes."""
    worker = pathlib.Path(__file__).with_name("context_worker.py")
    programs = {case: make_program(case) for case in values_asked_for(request, CASES)}
    return launch(worker, tmp_path_factory.mktemp("gloo"), programs)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order, as in the processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_rank(case, runs):
    """20 steps with clipping: losses and norms of one rank, to 1e-10 in float64, to 1e-6 in float32 with forced routing."""
    program = make_program(case, one_rank=True)
    run, state = program.bind(), program.init_state(make_params(case))
    bound = 1e-10 if CASES[case][2] == torch.float64 else 1e-6
    for batch, loss, norm in zip(BATCHES, runs[case]["losses"], runs[case]["norms"], strict=True):
        state, metrics = run(state, batch)
        assert abs(loss - metrics["loss"]) <= bound * metrics["loss"]
        assert abs(norm - metrics["grad_norm"]) <= 10 * bound * metrics["grad_norm"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "ring", "two_levels", "slices"])
def test_bits_equal_the_simulation(case, runs):
    """Losses, gradient norms and the state at the end are the simulator's, bit for bit."""
    program = make_program(case)
    expected, state = simulate(program, program.init_state(make_params(case)), BATCHES)
    assert_bits_equal(runs[case], program, expected, state)


@pytest.mark.parametrize(("case", "shifts"), [("ring", 3), ("two_levels", 1), ("deepseek_v3", 1)])
def test_ring_messages(case, shifts, runs):
    """Of each of two layers: once round forward; keys and their gradients once round backward. Bytes as the program says."""
    sent = [(op, axes, size) for op, axes, _, size in runs[case]["messages"] if op == "shift"]
    said = [(use.op, use.axes, use.bytes) for use in make_program(case).collectives() if use.op == "shift"]
    assert sent == said and len(sent) == 2 * 3 * shifts


@pytest.mark.parametrize("case", ["all_to_all"])
def test_messages_by_heads(case, runs):
    """Ulysses: four all_to_alls forward and four backward in each of two layers."""
    assert Counter(op for op, *_ in runs[case]["messages"])["all_to_all"] == 2 * (4 + 4)


@pytest.mark.parametrize(("case", "forced"), [("qwen3_moe", "qwen3_moe_forced")])
def test_messages_of_experts(case, forced, runs):
    """In each of two layers rows go twice each way and their numbers once; all rows that leave the four ranks are all slots."""
    counts = Counter(op for op, *_ in runs[case]["messages"])
    assert counts["exchange_rows"] == 2 * 4 and counts["all_to_all"] == 2
    slots = SHAPE[0] * SHAPE[1] // 4 * 2
    sizes = [size for op, _, _, size in runs[forced]["messages"] if op == "exchange_rows"]
    assert sizes == [slots * 16 * 4] * 8
