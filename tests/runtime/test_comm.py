"""Collectives of real processes, on both transports, against the lists of `mpar.collectives`."""

import pathlib
import subprocess
import sys
import time

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.gloo
FOLDER = pathlib.Path(__file__).parent


def torchrun(num_ranks, script, *args, timeout=PATIENCE_S):
    """The finished launch of `script` on `num_ranks` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run([*command, str(FOLDER / script), *args], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_have_the_bits_of_their_meaning(num_ranks):
    """All kinds, lists, odd sizes, dims, bf16 to int64: the bits of `combine`, operands untouched, no byte held in excess."""
    done = torchrun(num_ranks, "comm_worker.py")
    assert done.returncode == 0, done.stderr[-3000:]


def test_ranks_of_different_machines_use_the_backend():
    """Where memory cannot be shared torch.distributed carries everything, with the same bits; asking for it is an error."""
    done = torchrun(2, "comm_worker.py", "apart")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_rank_that_ends_stops_those_who_wait_for_it():
    """Ranks that wait in shared memory for a killed process raise within seconds, and name it."""
    begun = time.monotonic()
    done = torchrun(3, "comm_worker.py", "killed")
    assert time.monotonic() - begun < 60
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "which has ended" in done.stderr
