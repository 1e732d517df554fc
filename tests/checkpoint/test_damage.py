import json
import os
import re
import shutil
import zlib

import pytest
import torch

from mpar import checkpoint
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import on_all_ranks, same_bits, save_all, wanted_of

MESH = Mesh(dp=2, tp=2)
FILE = "rank-00001.safetensors"


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.table_VD": (torch.randn(8, 6, generator=generator), P("tp")),
        "layers.0.up_DF": (torch.randn(6, 10, generator=generator).bfloat16(), P(None, "tp")),
        "step": (torch.tensor(20 + seed), P()),
    }


@pytest.fixture
def saved(tmp_path):
    return save_all(tmp_path, 20, state(), MESH, extras={"data": {"epoch": 1, "position": [3, 4]}, "name": "é"})[0]


def load_all(path, values=None, mesh=MESH):
    return [checkpoint.load(path, wanted_of(values or state()), mesh, rank) for rank in range(mesh.size)]


def flip(file, position):
    raw = bytearray(file.read_bytes())
    raw[position] ^= 16
    file.write_bytes(raw)


@pytest.mark.parametrize("size", [0, 4, 20, -1], ids=["empty", "in the prefix", "in the header", "last byte"])
def test_truncated_file(saved, size):
    """A file cut anywhere is named with the size it should have, and the checkpoint is not `latest` any more."""
    whole = (saved / FILE).stat().st_size
    os.truncate(saved / FILE, size % whole)
    with pytest.raises(CheckpointError, match=rf"{FILE}: has {size % whole} bytes, the index says {whole}"):
        load_all(saved)
    assert checkpoint.latest(saved.parent) is None


def test_truncated_file_with_an_index_that_agrees(saved):
    """Where the index is wrong as well, the file's own header shows that it is too short."""
    whole = (saved / FILE).stat().st_size
    raw = json.loads((saved / "index.json").read_text())["index"]
    os.truncate(saved / FILE, whole - 3)
    raw["files"][FILE] = whole - 3
    rewrite_index(saved, raw)
    with pytest.raises(CheckpointError, match=rf"{FILE}: has {whole - 3} bytes, its header says {whole}"):
        load_all(saved)


def rewrite_index(path, body):
    """Store `body` under a checksum that fits: CRC-32 of the dump with sorted keys and no spaces."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (path / "index.json").write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "index": body}))


@pytest.mark.parametrize("position", [0, 30, -1], ids=["length of the header", "header", "data"])
def test_flipped_bit(saved, position):
    """One flipped bit anywhere in a file that is read whole is an error that names the file; `verify` finds it too."""
    flip(saved / FILE, position)
    with pytest.raises(CheckpointError, match=FILE):
        load_all(saved)
    with pytest.raises(CheckpointError, match=FILE):
        checkpoint.verify(saved)


def test_every_bit_of_the_data_counts(saved):
    """`verify` notices a flip at each byte of the data of a file."""
    size = (saved / FILE).stat().st_size
    data = 4 * 6 * 4 + 6 * 5 * 2  # its half of the table in float32, of up_DF in bfloat16
    for position in range(size - data, size):
        flip(saved / FILE, position)
        with pytest.raises(CheckpointError, match="checksum"):
            checkpoint.verify(saved)
        flip(saved / FILE, position)
    checkpoint.verify(saved)


def test_part_of_a_damaged_shard_is_not_checked_by_load_but_by_verify(saved):
    """A reader of half a shard cannot check it (as documented); `verify` does, naming the tensor."""
    flip(saved / FILE, -1)
    finer = Mesh(tp=4)
    wanted = {"embed.table_VD": ((8, 6), P("tp"), torch.float32)}
    for rank in range(4):
        checkpoint.load(saved, wanted, finer, rank, elsewhere=None)
    with pytest.raises(CheckpointError, match=FILE):
        checkpoint.verify(saved)


def test_all_damaged_files_are_listed(saved):
    """Two broken files give one error with both."""
    (saved / FILE).unlink()
    os.truncate(saved / "rank-00000.safetensors", 10)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(saved, wanted_of(state()), Mesh(tp=1), 0)
    assert f"{FILE}: is missing" in str(caught.value) and "rank-00000.safetensors: has 10 bytes" in str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_damaged_json(saved, name):
    """A flipped bit in any byte of index or state is noticed, with the name of the file, and by nothing but CheckpointError."""
    read = checkpoint.read_extras if name == "state.json" else load_all
    size = (saved / name).stat().st_size
    for position in range(0, size, 7):
        raw = (saved / name).read_bytes()
        flip(saved / name, position)
        if raw.split() != (saved / name).read_bytes().split():
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                read(saved)
        (saved / name).write_bytes(raw)
    read(saved)


def test_newer_version(saved):
    """An index of another format version is refused by that name, not misread."""
    raw = json.loads((saved / "index.json").read_text())["index"]
    rewrite_index(saved, raw | {"version": 2})
    with pytest.raises(CheckpointError, match="format version 2, this code reads version 1"):
        load_all(saved)


def test_folder_of_checkpoints_instead_of_one(saved):
    """Loading the parent folder says that one checkpoint's own folder is needed."""
    with pytest.raises(CheckpointError, match="Pass one checkpoint's own folder"):
        load_all(saved.parent)


def test_all_wrong_names_in_one_error(saved):
    """Missing, unexpected, mis-shaped and mis-typed names come in one error."""
    f32 = torch.float32
    wanted = {
        "embed.table_VD": ((8, 7), P(), f32),
        "layers.0.up_DF": ((6, 10), P(), f32),
        "head.w": ((2,), P(), f32),
        "head.b": ((2,), P(), f32),
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(saved, wanted, Mesh(), 0)
    lines = {line.strip() for line in str(caught.value).splitlines()}
    assert {
        "missing: head.w (2,)",
        "missing: head.b (2,)",
        "unexpected: step ()",
        "different: embed.table_VD is float32 (8, 6) in the checkpoint, float32 (8, 7) is wanted",
        "different: layers.0.up_DF is bfloat16 (6, 10) in the checkpoint, float32 (6, 10) is wanted",
    } <= lines


def test_specs_that_cannot_be_loaded(saved):
    """A spec that does not divide, a pending sum and a rank that is not on the mesh are refused before anything is read."""
    wanted = wanted_of(state()) | {"embed.table_VD": ((8, 6), P("tp"), torch.float32)}
    with pytest.raises(CheckpointError, match="tp=3 does not divide"):
        checkpoint.load(saved, wanted, Mesh(tp=3), 0)
    with pytest.raises(CheckpointError, match="a pending sum cannot be loaded"):
        checkpoint.load(saved, wanted | {"step": ((), P(partial="tp"), torch.int64)}, Mesh(tp=2), 0)
    with pytest.raises(CheckpointError, match=r"rank 2 is not on Mesh\(tp=2\)"):
        checkpoint.load(saved, wanted, Mesh(tp=2), 2)


def test_extras_come_back(saved):
    """Extras are read back equal, with the step."""
    assert checkpoint.read_extras(saved) == {"step": 20, "data": {"epoch": 1, "position": [3, 4]}, "name": "é"}


def test_no_pickle(saved):
    """Every file is safetensors or JSON: an 8-byte length and a JSON header, or text that parses."""
    files = sorted(saved.iterdir())
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        json.loads(raw[8 : 8 + length] if file.suffix == ".safetensors" else raw)


class Interrupted(BaseException):
    """Stands for the process being killed."""


def interrupt_at(call):
    """A barrier that kills its rank at the given call."""
    calls = iter(range(1, 10))

    def barrier():
        if next(calls) == call:
            raise Interrupted

    return barrier


def save_one(folder, step, barrier, values=None, **options):
    values = values or state(step)
    tensors = {path: x for path, (x, _) in values.items()}
    specs, shapes = dict.fromkeys(tensors, P()), {path: tuple(x.shape) for path, x in tensors.items()}
    extras = options.pop("extras", {})
    return checkpoint.save(folder, step, tensors, specs, Mesh(), 0, shapes, extras, barrier, **options)


@pytest.mark.parametrize("call", [1, 2])
def test_interrupted_write(call, tmp_path):
    """Killed half way: the old checkpoint loads and is `latest`; the next save of that step succeeds, and cleans up."""
    save_one(tmp_path, 1, lambda: None)
    with pytest.raises(Interrupted):
        save_one(tmp_path, 2, interrupt_at(call))
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    loaded = checkpoint.load(tmp_path / "step_00000001", wanted_of({k: (x, P()) for k, (x, _) in state(1).items()}), Mesh(), 0)
    assert all(same_bits(loaded[name], x) for name, (x, _) in state(1).items())
    with pytest.raises(Interrupted):
        save_one(tmp_path, 3, interrupt_at(call))
    save_one(tmp_path, 2, lambda: None, keep=5)
    checkpoint.verify(tmp_path / "step_00000002")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_fails_keeps_nobody_waiting(broken, tmp_path):
    """A wrong shard on one rank: all ranks get an error, none hangs, rank 0's names the rank, the old one stays."""
    save_all(tmp_path, 1, state(), MESH)

    def run(rank, barrier):
        local = torch.zeros(4 if rank == broken else 2)
        return checkpoint.save(tmp_path, 2, {"x": local}, {"x": P("tp")}, MESH, rank, {"x": (4,)}, {}, barrier, keep=1)

    errors = on_all_ranks(MESH.size, run)
    assert [type(error) for error in errors] == [CheckpointError] * 4
    assert "the local shape is (4,), but (4,) by P('tp') gives (2,)" in str(errors[broken])
    assert f"rank {broken}" in str(errors[0])
    assert checkpoint.available(tmp_path) == [tmp_path / "step_00000001"]


def test_an_error_while_writing(tmp_path, monkeypatch):
    """A full disk is an error of every rank, rank 0 lists whose disk it was, and there is no checkpoint."""

    def full(path, shards):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mpar.checkpoint._save.write_shards", full)
    errors = save_all(tmp_path, 2, state(), MESH)
    assert [type(error) for error in errors] == [CheckpointError] * 4
    for rank in (0, 1):  # the others have nothing to write
        assert f"rank {rank}: cannot save a checkpoint: OSError: [Errno 28] No space left" in str(errors[0])
    assert checkpoint.latest(tmp_path) is None


def test_a_tensor_that_no_rank_holds_whole(tmp_path):
    """If a stage's part is missing the save fails and says which tensor is not covered."""

    def run(rank, barrier):
        tensors = {"x": torch.zeros(2)} if rank == 0 else {}
        given = dict.fromkeys(tensors, P("tp")), MESH, rank, dict.fromkeys(tensors, (4,))
        return checkpoint.save(tmp_path, 2, tensors, *given, {}, barrier)

    errors = on_all_ranks(MESH.size, run)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "x (4,): 1 shards of shape (2,) do not cover it: 2 were expected" in str(errors[0])


def test_all_wrong_arguments_in_one_error(tmp_path):
    """Names that disagree, a pending sum, a dtype that cannot be saved, and extras that are not JSON come together."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex64)}
    specs = {"b": P(partial="tp"), "c": P(), "d": P()}
    extras = {"position": torch.tensor(3), "loss": float("nan"), "ids": {1: 2}, "fine": [1, None, "x", True, 2.5]}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, -1, tensors, specs, Mesh(tp=1), 0, dict.fromkeys("abc", (2,)), extras, lambda: None, keep=0)
    message = str(caught.value)
    for part in (
        "a: is not in specs",
        "b by P(partial='tp'): is a pending sum",
        "c: dtype torch.complex64 cannot be saved",
        "d: is not in tensors nor in shapes",
        "extras.position: a Tensor is not a JSON value",
        "extras.loss: nan",
        "extras.ids: key 1",
        "step must be a non-negative int, not -1",
        "keep must be at least 1",
    ):
        assert part in message, part
    assert "fine" not in message
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    """Saving a step that is there is refused on every rank, and leaves it as it was."""
    path = save_all(tmp_path, 1, state(), MESH)[0]
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    errors = save_all(tmp_path, 1, state(1), MESH)
    assert all(isinstance(error, CheckpointError) and "exists" in str(error) for error in errors)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_latest_and_available_pass_over_what_is_not_complete(tmp_path):
    """Order is by step, not by name or time; folders without index, with a missing file or another name do not count."""
    assert checkpoint.latest(tmp_path / "absent") is None and checkpoint.available(tmp_path / "absent") == []
    for step in (100_000_000, 9, 20, 30, 40):
        save_one(tmp_path, step, lambda: None)
    (tmp_path / "step_00000030" / "index.json").unlink()
    (tmp_path / "step_00000040" / "rank-00000.safetensors").unlink()
    shutil.copytree(tmp_path / "step_00000020", tmp_path / "step_copy")
    (tmp_path / "step_00000050").write_text("a file")
    names = [path.name for path in checkpoint.available(tmp_path)]
    assert names == ["step_00000009", "step_00000020", "step_100000000"]
    shutil.rmtree(tmp_path / "step_100000000")
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000020"


def test_keep_deletes_the_oldest_complete_ones_only(tmp_path):
    """keep=2 leaves the two highest steps and what it does not know; the one just saved stays even if its step is low."""
    for step in (1, 2, 3):
        save_one(tmp_path, step, lambda: None)
    (tmp_path / "step_00000002" / "index.json").unlink()
    save_one(tmp_path, 4, lambda: None, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]
    save_one(tmp_path, 1, lambda: None, keep=2)
    assert [path.name for path in checkpoint.available(tmp_path)] == ["step_00000001", "step_00000003", "step_00000004"]


def test_old_ones_are_deleted_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    """At the moment of the first deletion the new checkpoint is the latest, and verifies."""
    save_one(tmp_path, 1, lambda: None)
    seen = []
    remove = shutil.rmtree

    def watch(path, *args, **options):
        seen.append((os.path.basename(path), checkpoint.latest(tmp_path)))
        if "deleted" in os.path.basename(path):
            checkpoint.verify(tmp_path / "step_00000002")
        remove(path, *args, **options)

    monkeypatch.setattr("shutil.rmtree", watch)
    save_one(tmp_path, 2, lambda: None, keep=1)
    assert (".step_00000001.deleted", tmp_path / "step_00000002") in seen
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    """The save succeeds if an old checkpoint cannot be deleted, and says so."""
    save_one(tmp_path, 1, lambda: None)

    def refuse(path, *args, **options):
        if not options.get("ignore_errors"):
            raise PermissionError(f"not {path}")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.warns(UserWarning, match=re.escape("cannot delete old checkpoints")):
        path = save_one(tmp_path, 2, lambda: None, keep=1)
    assert checkpoint.latest(tmp_path) == path
