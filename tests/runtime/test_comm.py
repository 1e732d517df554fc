"""Collectives of real processes, on both transports, against the lists of `mpar.collectives`."""

import pathlib
import time

import pytest

from tests.processes import torchrun

pytestmark = pytest.mark.gloo
WORKER = pathlib.Path(__file__).with_name("comm_worker.py")


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_have_the_bits_of_their_meaning(num_ranks):
    """All kinds, lists, odd sizes, dims, bf16 to int64: the bits of `combine`, operands untouched, no byte held in excess."""
    done = torchrun(WORKER, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]


def test_ranks_of_different_machines_use_the_backend():
    """Where memory cannot be shared torch.distributed carries everything, with the same bits; asking for it is an error."""
    done = torchrun(WORKER, "apart", num_ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_rank_that_ends_stops_those_who_wait_for_it():
    """Ranks that wait in shared memory for a killed process raise within seconds, and name it."""
    begun = time.monotonic()
    done = torchrun(WORKER, "killed", num_ranks=3)
    assert time.monotonic() - begun < 60
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "which has ended" in done.stderr
