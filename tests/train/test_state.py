"""The state of a rank, and the loop's own checks."""

import math

import pytest
import torch

from mpar import models, tree
from mpar.errors import CheckpointError, NumericsError
from mpar.shards import assemble
from mpar.train import fresh_state, make_optimizer, make_setup, resume_from
from mpar.train._loop import _check_finite
from mpar.train._setup import batch_shapes, batch_size
from mpar.train.prepare import compile_program

CPU = torch.device("cpu")


def test_fresh_shards_are_parts_of_the_whole(config, program):
    """The shards of all ranks, put together, are the model's own initial parameters; slots are zero."""
    model = make_setup(config).model
    states = [fresh_state(program, model, rank, seed=3, hf_path=None, device=CPU) for rank in range(4)]
    whole = dict(tree.leaves_with_path(model.init(3)))
    for leaf in program.state_in:
        found = assemble([state.leaves[leaf.path] for state in states], leaf.spec, program.mesh)
        kind, _, path = leaf.path.partition(".")
        assert torch.equal(found, whole[path] if kind == "params" else torch.zeros(leaf.shape))


def test_shards_of_a_hugging_face_folder(config, program, tmp_path):
    """From a folder with weights, the shards of all ranks are those weights."""
    model = make_setup(config).model
    params = model.init(5)
    models.to_hf(model, params, tmp_path / "hf")
    states = [fresh_state(program, model, rank, seed=0, hf_path=str(tmp_path / "hf"), device=CPU) for rank in range(4)]
    whole = dict(tree.leaves_with_path(params))
    for leaf in program.state_in:
        if leaf.path.startswith("params."):
            found = assemble([state.leaves[leaf.path] for state in states], leaf.spec, program.mesh)
            assert torch.equal(found, whole[leaf.path.removeprefix("params.")])


def test_a_loss_that_is_not_finite_names_step_and_microbatch():
    """The first microbatch whose loss is not finite is named; a gradient norm alone is told apart."""
    with pytest.raises(NumericsError, match=r"loss is nan in step 12, first in microbatch 2 \(in 1 of 4\)"):
        _check_finite(12, math.nan, 1.0, torch.tensor([1.0, 2.0, math.nan, 3.0]))
    with pytest.raises(NumericsError, match=r"gradient norm is inf in step 3, while the loss is 2\.0"):
        _check_finite(3, 2.0, math.inf, torch.tensor([2.0]))
    with pytest.raises(NumericsError, match=r"first in microbatch 1 \(in 2 of 3\)"):
        _check_finite(3, math.inf, 1.0, torch.tensor([2.0, math.inf, math.nan]))
    _check_finite(3, 2.0, 1.0, torch.tensor([2.0]))


def test_resume_choices(tmp_path):
    """auto without a checkpoint is a fresh start; a folder that is no checkpoint is refused."""
    assert resume_from(tmp_path, "auto") is None
    assert resume_from(tmp_path, "never") is None
    with pytest.raises(CheckpointError):
        resume_from(tmp_path, str(tmp_path / "nothing"))


def test_default_batch_size(config):
    """8 sequences, or as many as mesh and microbatches need."""
    big = _with(config, fsdp=48)
    assert batch_size(big) == 96
    assert batch_shapes(config, make_setup(config).model)["tokens"][0] == (4, 128)


def _with(config, fsdp):
    mesh = type(config.mesh)(fsdp=fsdp)
    data = type(config.data)(sources=("x",), batch_size=None)
    return type(config)(**{**vars(config), "mesh": mesh, "data": data})


def test_schedules(config):
    """The optimizer's rate follows the configured schedule over all steps."""
    cosine = make_optimizer(config.optimizer, 100)
    assert cosine.rate(5) == pytest.approx(3e-3)
    assert cosine.rate(100) == pytest.approx(3e-4)
    assert compile_program(make_setup(config)).facts.optimizer == make_optimizer(config.optimizer, config.steps)
