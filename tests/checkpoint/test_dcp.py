"""Conversion from and to torch.distributed.checkpoint, which itself reads and writes the other side."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mpar import checkpoint
from mpar.checkpoint.dcp import from_dcp, to_dcp
from mpar.errors import CheckpointError
from tests.checkpoint.ranks import same_bits, save_all
from tests.checkpoint.test_golden import EXTRAS, GOLDEN, MESH, golden_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def converted(tmp_path):
    to_dcp(GOLDEN / "version2", tmp_path / "dcp")
    return tmp_path / "dcp"


def test_torch_reads_what_is_written(converted):
    """dcp.load fills tensors of the logical names with the bits that were saved, and nobody needs mpar for the extras."""
    wanted = {name: torch.zeros_like(x) for name, (x, _) in golden_state().items()}
    dcp.load(wanted, checkpoint_id=converted)
    assert all(same_bits(wanted[name], x) for name, (x, _) in golden_state().items())
    size = dcp.FileSystemReader(converted).read_metadata().state_dict_metadata["mpar.extras"].size
    extras = {"mpar.extras": torch.zeros(size, dtype=torch.uint8)}
    dcp.load(extras, checkpoint_id=converted)
    assert json.loads(bytes(extras["mpar.extras"].tolist())) == {"step": 20, **EXTRAS}


def test_there_and_back(converted, tmp_path):
    """A checkpoint that went through DCP has the same bits, step and extras; progress tells all bytes."""
    read = []
    assert from_dcp(converted, tmp_path / "back", on_bytes=read.append) == []
    checkpoint.verify(tmp_path / "back")
    assert checkpoint.read_extras(tmp_path / "back") == {"step": 20, **EXTRAS}
    with checkpoint.Reader(tmp_path / "back") as back:
        assert set(back.tensors) == set(golden_state())
        assert all(same_bits(back.read(name), x) for name, (x, _) in golden_state().items())
        assert sum(read) > sum(tensor.num_bytes for tensor in back.tensors.values())


def test_what_torch_writes_is_read(tmp_path):
    """A folder that dcp.save wrote from a nested state: tensors have DCP's names, what is no tensor is left out."""
    state = {"model": {"w": torch.randn(5, 3), "half": torch.randn(4).bfloat16(), "n": torch.tensor(3)}, "lr": 0.1}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert from_dcp(tmp_path / "dcp", tmp_path / "ours", step=7) == ["lr"]
    with checkpoint.Reader(tmp_path / "ours") as ours:
        assert ours.step == 7 and ours.extras == {"step": 7}
        assert all(same_bits(ours.read(f"model.{name}"), x) for name, x in state["model"].items())


class InChunks(dcp.DefaultSavePlanner):
    """Writes `x` in uneven chunks of rows, as ranks do that hold a part each."""

    def __init__(self, x, starts):
        super().__init__(flatten_state_dict=False)
        self.x, self.ends = x, dict(zip(starts, [*starts[1:], len(x)], strict=True))

    def create_local_plan(self):
        items = []
        for start, end in self.ends.items():
            offsets, sizes = torch.Size([start, 0]), torch.Size([end - start, self.x.shape[1]])
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = TensorWriteData(chunk, TensorProperties(self.x.dtype), self.x.shape)
            items.append(WriteItem(MetadataIndex("x", offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item):
        start = write_item.index.offset[0]
        return self.x[start : self.ends[start]].clone()


def test_chunks_of_several_ranks(tmp_path):
    """A tensor that DCP has in chunks is put together; if one is missing that is an error."""
    x = torch.randn(10, 3)
    dcp.save({}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), planner=InChunks(x, [0, 4, 8]), no_dist=True)
    from_dcp(tmp_path / "dcp", tmp_path / "ours")
    with checkpoint.Reader(tmp_path / "ours") as ours:
        assert same_bits(ours.read("x"), x)
    rewrite(tmp_path / "dcp", lambda metadata: metadata.state_dict_metadata["x"].chunks.pop())
    with pytest.raises(CheckpointError, match="the chunks of 'x' do not cover"):
        from_dcp(tmp_path / "dcp", tmp_path / "other")


def rewrite(folder: Path, change):
    """Change the metadata of a DCP folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def cut_in_two(metadata):
    """Say that the table consists of two halves, both at the place of the first."""
    stored = metadata.state_dict_metadata["params.embed.table_VD"]
    stored.chunks = [type(stored.chunks[0])(torch.Size([0, 0]), torch.Size([4, 6]))] * 2


def escape(metadata):
    """Name a file outside of the folder."""
    next(iter(metadata.storage_data.values())).relative_path = "../secret.distcp"


def other_shape(metadata):
    """Say a shape that the bytes do not have."""
    metadata.state_dict_metadata["mask"].chunks[0].sizes = metadata.state_dict_metadata["mask"].size = torch.Size([2**50])


@pytest.mark.parametrize("change", [cut_in_two, escape, other_shape])
def test_metadata_that_do_not_fit(converted, tmp_path, change):
    """Overlapping chunks, files elsewhere and wrong shapes are refused, and nothing is left behind."""
    rewrite(converted, change)
    with pytest.raises(CheckpointError):
        from_dcp(converted, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


class Stranger:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return shutil.rmtree, (str(self.path),)


def test_a_pickle_that_would_run_code(converted, tmp_path):
    """The metadata are a pickle; one that names anything else than what metadata consist of is refused before it runs."""
    (tmp_path / "precious").mkdir()
    (converted / ".metadata").write_bytes(pickle.dumps(Stranger(tmp_path / "precious")))
    with pytest.raises(CheckpointError, match=r"the metadata name shutil\.rmtree"):
        from_dcp(converted, tmp_path / "back")
    assert (tmp_path / "precious").is_dir()


def test_members_are_read_as_any_python_writes_them(converted, tmp_path, monkeypatch):
    """Until 3.11.3 Python pickled a member of an enumeration as a call of getattr, which may give nothing else here."""
    encoding = _MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, protocol: (getattr, (encoding, self.name)))
    rewrite(converted, lambda metadata: None)
    assert b"getattr" in (converted / ".metadata").read_bytes()
    from_dcp(converted, tmp_path / "back")
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda self, protocol: (getattr, (encoding, "__init__")))
    rewrite(converted, lambda metadata: None)
    with pytest.raises(CheckpointError, match=r"ask for '__init__' of"):
        from_dcp(converted, tmp_path / "again")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_folders(converted, tmp_path, name):
    """Truncated or missing files are a CheckpointError."""
    content = (converted / name).read_bytes()
    (converted / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=name):
        from_dcp(converted, tmp_path / "back")
    (converted / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: is missing"):
        from_dcp(converted, tmp_path / "back")


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    """to_dcp compares what it reads, and leaves nothing behind; what exists is not overwritten."""
    path = save_all(tmp_path, 20, golden_state(), MESH, extras=EXTRAS)[0]
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-60] + b"0" * 60)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        to_dcp(path, tmp_path / "dcp")
    assert [other.name for other in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="exists"):
        to_dcp(GOLDEN / "version2", path)
