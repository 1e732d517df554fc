"""Compiled functions that run: alone on plain tensors, on four processes on DTensors."""

import pathlib

import pytest
import torch

import mpar
from mpar import Mesh, P
from mpar.errors import MeshError
from tests.processes import torchrun


def test_one_rank_runs_on_plain_tensors():
    """On a mesh of one rank a compiled function takes and gives plain tensors."""
    x = torch.randn(4, 3, dtype=torch.float64)
    step = mpar.jit(mpar.value_and_grad(lambda x: (x.sin() @ x.mT).sum()), mesh=Mesh(dp=1))
    value, grad = step(x)
    expected, expected_grad = mpar.value_and_grad(lambda x: (x.sin() @ x.mT).sum())(x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_too_few_processes():
    """A mesh of two ranks does not run in one process, and says so before anything else."""
    with pytest.raises(MeshError, match="1 process is running"):
        mpar.jit(torch.sin, mesh=Mesh(dp=2), in_specs=(P("dp"),))(torch.ones(2))


@pytest.mark.gloo
def test_four_ranks_run_on_dtensors():
    """Values, gradients and placements on four processes; the worker says what it compares."""
    done = torchrun(pathlib.Path(__file__).with_name("jit_worker.py"))
    assert done.returncode == 0, done.stderr[-3000:]
