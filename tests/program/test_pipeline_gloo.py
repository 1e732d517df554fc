"""Pipelines on real processes: four ranks on gloo have the bits of the simulation, whichever way messages travel."""

import functools
import pathlib
import pickle

import pytest
import torch

from mpar.shards import shard
from tests.processes import torchrun
from tests.program.pipeline_worker import (
    CASES,
    GROUPED,
    NUM_GROUPED,
    TRANSPORTS,
    make_batches,
    make_eval,
    make_model,
    make_program,
    message,
)
from tests.tiers import values_asked_for

pytestmark = pytest.mark.gloo
RANKS = range(4)


make_program, make_eval = functools.cache(make_program), functools.cache(make_eval)


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """What each rank saved, from one launch of four processes that run the cases of the selected tests, compiled here."""
    folder = tmp_path_factory.mktemp("pipelines")
    for case in values_asked_for(request, CASES):
        (folder / f"{case}.pickle").write_bytes(pickle.dumps((make_program(case), make_eval(case))))
    done = torchrun(pathlib.Path(__file__).with_name("pipeline_worker.py"), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in RANKS]


@functools.cache
def simulated(case):
    """The program, its metrics of every step, and the global state at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program, metrics = make_program(case), []
    state = program.init_state(make_model(case).init(0))
    for batch in make_batches():
        state, found = program.simulate(state, batch)
        metrics.append(found)
    torch.set_num_threads(threads)
    return program, metrics, state.leaves


@pytest.mark.cases(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", CASES)
def test_bits_equal_the_simulation(case, transport, ranks):
    """Every metric of every step on every rank, and each rank's shards of the state behind the last, are the simulator's."""
    program, metrics, leaves = simulated(case)
    for rank in RANKS:
        found = ranks[rank]["trained"][case, transport]
        for step, (mine, expected) in enumerate(zip(found["metrics"], metrics, strict=True)):
            assert mine.keys() == expected.keys()
            assert all(torch.equal(mine[name], expected[name]) for name in expected), (rank, step)
        own = program.part(rank).state_out
        assert found["leaves"].keys() == {leaf.path for leaf in own}
        for leaf in own:
            assert torch.equal(found["leaves"][leaf.path], shard(leaves[leaf.path], leaf.spec, program.mesh, rank)), leaf.path


@pytest.mark.cases(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", CASES)
def test_evaluation_has_the_loss_of_training(case, transport, ranks):
    """On every rank the loss of the forwards alone is that of the first step, and the simulated evaluation's, bit for bit."""
    program = make_eval(case)
    _, expected = program.simulate(program.init_state(make_model(case).init(0)), make_batches()[0])
    for rank in RANKS:
        found = ranks[rank]["trained"][case, transport]
        for name in ("loss", "microbatch_losses", "weight"):
            assert torch.equal(found["evaluation"][name], expected[name])
            assert torch.equal(found["evaluation"][name], found["metrics"][0][name])


def test_grouped_channels_keep_their_messages_in_order(ranks):
    """With a group for each channel and no tags: every message arrives, in the order of posting, though waited for backwards."""
    for rank in RANKS:
        expected = {(channel, number) for channel in GROUPED if channel[1] == rank for number in range(NUM_GROUPED)}
        assert ranks[rank]["grouped"].keys() == expected
        for (channel, number), x in ranks[rank]["grouped"].items():
            assert torch.equal(x, message(channel, number)), (channel, number)
