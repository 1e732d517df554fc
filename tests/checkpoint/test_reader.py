"""Reading without a mesh: boxes across shards, norms, differences."""

import math
import random

import pytest
import torch

from mpar import checkpoint
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import same_bits, save_all
from tests.tiers import examples


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp"), P("fsdp", "tp"), P()], ids=str)
def test_boxes_across_shards(spec, tmp_path):
    """Any box has the bits of the tensor, wherever the borders of shards lie; without a box it is all of it."""
    x = torch.randn(60, 24, 40)
    path = save_all(tmp_path, 1, {"x": (x, spec)}, Mesh(fsdp=2, tp=2))[0]
    draw = random.Random(str(spec))
    with checkpoint.Reader(path) as reader:
        assert same_bits(reader.read("x"), x)
        for _ in range(examples(20)):
            box = tuple((first := draw.randrange(size), draw.randint(1, size - first)) for size in x.shape)
            assert same_bits(reader.read("x", box), x[tuple(slice(first, first + size) for first, size in box)])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (3_000_000,), (2, 3, 700_000), (7, 1_500_000), (40_000, 130)], ids=str)
def test_boxes_cover_a_tensor_once(shape, tmp_path):
    """The boxes of a tensor hold every element exactly once, and 4 MiB at most."""
    path = save_all(tmp_path, 1, {"x": (torch.zeros(shape, dtype=torch.uint8), P())}, Mesh())[0]
    seen = torch.zeros(shape, dtype=torch.uint8)
    with checkpoint.Reader(path) as reader:
        for box in reader.boxes("x"):
            assert math.prod(size for _, size in box) <= 2**22
            seen[tuple(slice(first, first + size) for first, size in box)] += 1
    assert bool((seen == 1).all())


def test_more_files_than_are_kept_open(tmp_path):
    """A tensor in more files than are open at once is read as any other."""
    x = torch.arange(160.0)
    path = save_all(tmp_path, 1, {"x": (x, P("fsdp"))}, Mesh(fsdp=80))[0]
    with checkpoint.Reader(path) as reader:
        assert same_bits(reader.read("x"), x)


def test_norms_and_differences(tmp_path):
    """Norms are those of float64; equal bits are equal even if they are nan; a nan in one of them makes the figures nan."""
    a = {
        "x": torch.randn(300, 70).bfloat16(),
        "y": torch.tensor([1.0, math.nan]),
        "z": torch.tensor([3, 4]),
        "zero": torch.zeros(2),
    }
    b = {**a, "x": a["x"].clone(), "z": torch.tensor([math.nan, 4]), "zero": torch.ones(2)}
    b["x"][5, 5] += 1
    a["z"] = a["z"].float()
    states = [{key: (x, P()) for key, x in state.items()} for state in (a, b)]
    paths = [save_all(tmp_path / name, 1, state, Mesh())[0] for name, state in zip("ab", states, strict=True)]
    with checkpoint.Reader(paths[0]) as one, checkpoint.Reader(paths[1]) as other:
        assert checkpoint.norm(one, "x") == pytest.approx(float(a["x"].double().norm()), rel=1e-12)
        assert checkpoint.norm(one, "z") == 5.0 and math.isnan(checkpoint.norm(one, "y"))
        changed = checkpoint.tensor_difference(one, other, "x")
        difference = b["x"].double() - a["x"].double()
        assert changed.max_abs == float(difference.abs().max())
        assert changed.relative_norm == pytest.approx(float(difference.norm() / a["x"].double().norm()), rel=1e-12)
        assert checkpoint.tensor_difference(one, other, "y") is None
        assert math.isnan(checkpoint.tensor_difference(one, other, "z").max_abs)
        assert checkpoint.tensor_difference(one, other, "zero").relative_norm == math.inf
