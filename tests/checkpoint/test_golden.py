"""Checkpoints of every version of the format, as they were written, are read by the code of today.

`python -m tests.checkpoint.test_golden FOLDER` writes the state below into FOLDER. Once a version is released, its golden does
not change any more: a change of what is written is a new version, with a golden of its own.
"""

import filecmp
import sys
from pathlib import Path

import pytest
import torch

from mpar import checkpoint
from mpar.checkpoint._index import VERSION
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import cut, same_bits, save_all

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, VERSION + 1)
MESH = Mesh(fsdp=2, tp=2)
EXTRAS = {"seed": 1, "config": {"lr": 0.001, "name": "é"}}


def golden_state():
    """What all golden checkpoints hold: cut along either dim or both, a scalar, booleans, and a tensor without elements."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(8, 6, generator=generator)
    up = torch.randn(6, 10, generator=generator).bfloat16()
    moment = torch.randn(8, 6, generator=generator)
    return {
        "params.embed.table_VD": (table, P("tp")),
        "params.layers.0.up_DF": (up, P("fsdp", "tp")),
        "opt.m.embed.table_VD": (moment, P(None, "tp")),
        "opt.count": (torch.tensor(20), P()),
        "mask": (torch.rand(3, generator=generator) > 0.5, P()),
        "empty": (torch.zeros(0, 4, dtype=torch.float16), P()),
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mesh", [Mesh(tp=1), Mesh(tp=2), Mesh(fsdp=3, tp=2)], ids=repr)
def test_every_version_is_read(version, mesh):
    """All ranks of a mesh get the bits that were saved, whole or along other dims, and the extras."""
    path = GOLDEN / f"version{version}"
    state = {name: (x, P(None, "tp") if x.shape == (8, 6) else P()) for name, (x, _) in golden_state().items()}
    wanted = {name: (tuple(x.shape), spec, x.dtype) for name, (x, spec) in state.items()}
    for rank in range(mesh.size):
        loaded = checkpoint.load(path, wanted, mesh, rank)
        assert all(same_bits(loaded[name], cut(x, spec, mesh, rank)) for name, (x, spec) in state.items())
    checkpoint.verify(path)
    assert checkpoint.read_extras(path) == {"step": 20, **EXTRAS}


def test_what_is_written_is_the_newest_version(tmp_path):
    """A save of today has the bytes of the newest golden: nothing about the format changes without a new version."""
    path = save_all(tmp_path, 20, golden_state(), MESH, extras=EXTRAS)[0]
    names = sorted(file.name for file in path.iterdir())
    assert names == sorted(file.name for file in (GOLDEN / f"version{VERSION}").iterdir())
    assert filecmp.cmpfiles(path, GOLDEN / f"version{VERSION}", names, shallow=False) == (names, [], [])


if __name__ == "__main__":
    print(save_all(Path(sys.argv[1]), 20, golden_state(), MESH, extras=EXTRAS)[0])
