"""The state of a rank, and the loop's own checks."""

import pytest
import torch

from mpar import checkpoint, models, tree
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.shards import assemble
from mpar.spec import P
from mpar.train import fresh_state, make_optimizer, make_setup, resume_from
from mpar.train._setup import batch_shapes, batch_size
from mpar.train.compile import compile_program
from tests.checkpoint.ranks import save_all

CPU = torch.device("cpu")


def test_fresh_shards_are_parts_of_the_whole(config, program):
    """The shards of all ranks, put together, are the model's own initial parameters; slots are zero."""
    model = make_setup(config).model
    states = [fresh_state(program, model, rank, seed=3, source=None, device=CPU) for rank in range(4)]
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
    states = [fresh_state(program, model, rank, seed=0, source=str(tmp_path / "hf"), device=CPU) for rank in range(4)]
    whole = dict(tree.leaves_with_path(params))
    for leaf in program.state_in:
        if leaf.path.startswith("params."):
            found = assemble([state.leaves[leaf.path] for state in states], leaf.spec, program.mesh)
            assert torch.equal(found, whole[leaf.path.removeprefix("params.")])


def test_resume_choices(tmp_path):
    """auto without a checkpoint is a fresh start; a folder that is no checkpoint is refused."""
    assert resume_from(tmp_path, "auto") is None
    assert resume_from(tmp_path, "never") is None
    with pytest.raises(CheckpointError):
        resume_from(tmp_path, str(tmp_path / "nothing"))


def test_a_damaged_newest_checkpoint(tmp_path):
    """auto stops at it, and says what moves it aside; after that the run goes on from the one before."""
    for step in (1, 2):
        save_all(tmp_path / "checkpoints", step, {"x": (torch.ones(3), P())}, Mesh())
    newest = tmp_path / "checkpoints" / "step_00000002"
    (newest / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_00000002(.|\n)*read is step_00000001(.|\n)*on_damaged=move_aside"):
        resume_from(tmp_path, "auto")
    with pytest.raises(CheckpointError, match="step_00000002"):
        resume_from(tmp_path, "never")
    (line,) = checkpoint.move_damaged_aside(tmp_path / "checkpoints")
    assert "is damaged and was renamed to step_00000002.damaged" in line
    assert resume_from(tmp_path, "auto") == tmp_path / "checkpoints" / "step_00000001"


def test_default_batch_size(config):
    """8 sequences, or as many as mesh and microbatches need."""
    big = _with(config, fsdp=48)
    assert batch_size(big) == 96
    setup = make_setup(config)
    assert batch_shapes(config, setup.chain, setup.model)["tokens"][0] == (4, 128)


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
