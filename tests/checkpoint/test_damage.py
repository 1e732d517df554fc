import json
import os
import re
import shutil
import socket
import time
import zlib

import pytest
import torch

from mpar import checkpoint
from mpar.checkpoint import Keep, SaveOptions, _folders
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import on_all_ranks, save_all, wanted_of

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
    """A file cut anywhere is named with the size it should have, by `load` and by `latest`."""
    whole = (saved / FILE).stat().st_size
    os.truncate(saved / FILE, size % whole)
    with pytest.raises(CheckpointError, match=rf"{FILE}: has {size % whole} bytes, the index says {whole}"):
        load_all(saved)
    with pytest.raises(
        CheckpointError, match=rf"cannot go on from the newest checkpoint, .*\n.*{FILE}: has {size % whole} bytes"
    ):
        checkpoint.latest(saved.parent)
    assert checkpoint.available(saved.parent) == []


def rewrite_index(path, body):
    """Store `body` under a checksum that fits: CRC-32 of the dump without spaces."""
    text = json.dumps(body, separators=(",", ":"))
    (path / "index.json").write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "index": {text}}}\n')


@pytest.mark.parametrize("position", [0, 30, -1], ids=["length of the header", "header", "data"])
def test_flipped_bit(saved, position):
    """One flipped bit anywhere in a file that is read whole is an error that names the file; `verify` finds it too."""
    flip(saved / FILE, position)
    with pytest.raises(CheckpointError, match=FILE):
        load_all(saved)
    with pytest.raises(CheckpointError, match=FILE):
        checkpoint.verify(saved)


def test_every_bit_of_the_data_counts(saved):
    """`verify` notices a flip at each byte of the data of a file, and of its checksums."""
    size = (saved / FILE).stat().st_size
    data = 4 * 6 * 4 + 6 * 5 * 2  # its half of the table in float32, of up_DF in bfloat16
    for position in range(size - data, size):
        flip(saved / FILE, position)
        with pytest.raises(CheckpointError, match="checksum"):
            checkpoint.verify(saved)
        flip(saved / FILE, position)
    checkpoint.verify(saved)


def test_a_part_of_a_damaged_shard(saved):
    """Readers of half a shard compare the blocks that they read: one of them refuses the flip, naming the tensor."""
    flip(saved / FILE, -77)  # behind the table are 60 bytes of up_DF and two checksums
    finer = Mesh(tp=4)
    wanted = {"embed.table_VD": ((8, 6), P("tp"), torch.float32)}
    errors = []
    for rank in range(4):
        try:
            checkpoint.load(saved, wanted, finer, rank, elsewhere=None)
        except CheckpointError as error:
            errors.append(str(error))
    assert errors and all(f"{FILE}: the bytes of 'embed.table_VD' do not fit" in error for error in errors)


def test_the_newest_that_is_damaged(saved):
    """`latest` names it, the one before, and the ways out; `move_damaged_aside` finds a bit that only reading all of it shows."""
    folder = saved.parent
    save_all(folder, 19, state(), MESH)
    save_all(folder, 21, state(), MESH)
    (folder / ".step_00000022.partial").mkdir()
    flip(folder / "step_00000021" / FILE, -20)
    (saved / "state.json").write_text("{}")
    assert checkpoint.latest(folder) == folder / "step_00000021"
    with pytest.raises(CheckpointError, match=r"checkpoint\.on_damaged=move_aside.*renames it to step_00000021\.damaged"):
        load_all(folder / "step_00000021")
    lines = checkpoint.move_damaged_aside(folder)
    assert [f"step_000000{step}.damaged" in line for step, line in zip((21, 20), lines, strict=True)] == [True, True]
    assert FILE in lines[0] and "state.json" in lines[1]
    assert checkpoint.latest(folder) == folder / "step_00000019"
    assert checkpoint.move_damaged_aside(folder) == []
    save_all(folder, 21, state(), MESH)
    (folder / "step_00000021" / "index.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.latest(folder)
    for fact in ("step_00000021", "has no index.json", "that can be read is step_00000019", "on_damaged=move_aside", "resume="):
        assert fact in str(caught.value)
    assert checkpoint.move_aside(folder / "step_00000021").name == "step_00000021.damaged-1"


@pytest.mark.parametrize("name", ["index.json", "state.json", FILE])
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "device", "socket"])
def test_what_is_no_file(saved, name, kind):
    """A pipe, a link (to the right content), a folder, a device or a socket in the place of a file is refused, and at once."""
    target = saved / name
    target.rename(saved / "kept")
    if kind == "fifo":
        os.mkfifo(target)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(saved)  # the name of a socket is short
            listener.bind(name)
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("/dev/zero" if kind == "device" else saved / "kept")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=name):
        load_all(saved)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"index":' * 100_000, b'{"crc32": 1, "index": {"version": 2}}', b"1" * 10_000, b"[]", b"\xff", b""],
)
@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_hostile_json(saved, name, content):
    """Deep, huge, wrong or empty JSON is a CheckpointError that names the file."""
    (saved / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_all(saved)


def test_an_index_larger_than_what_it_describes(saved):
    """An index of some megabytes beside files of some hundred bytes is refused by its size, before it is parsed."""
    (saved / "index.json").write_bytes(b"[" + b"[]," * 1_000_000 + b"[]]")
    with pytest.raises(CheckpointError, match=r"index\.json: has 3000004 bytes, which is more than"):
        load_all(saved)


def test_shapes_that_no_file_holds(saved):
    """Memory is not taken for a tensor of a shape that the index claims, if the files are too small for it."""
    body = json.loads((saved / "index.json").read_text())["index"]
    body["tensors"]["step"] |= {"shape": [2**50], "block": [2**50]}
    rewrite_index(saved, body)
    with checkpoint.Reader(saved) as reader, pytest.raises(CheckpointError, match="the index says"):
        reader.read("step")
    with pytest.raises(CheckpointError, match="the index says"):
        checkpoint.verify(saved)


@pytest.mark.parametrize("name", ["index.json", "state.json", FILE])
def test_a_file_larger_than_its_content_can_be(saved, name):
    """A file of a terabyte without content is refused by its size."""
    os.truncate(saved / name, 2**40)
    with pytest.raises(CheckpointError, match=f"{name}: has {2**40} bytes"):
        load_all(saved)


def test_files_have_the_mode_of_the_umask(tmp_path):
    """Whoever may read one file of a checkpoint may read all."""
    before = os.umask(0o027)
    try:
        path = save_all(tmp_path, 1, state(), MESH)[0]
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


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
    rewrite_index(saved, {"version": 3, "what": "nobody knows"} | raw | {"version": 3})
    with pytest.raises(CheckpointError, match="format version 3, this code reads versions 1 to 2: a newer mpar wrote it"):
        load_all(saved)
    for look in (checkpoint.latest, checkpoint.move_damaged_aside):  # it is not damaged
        with pytest.raises(CheckpointError, match=r"Update mpar\.$"):
            look(saved.parent)
    text = (saved / "index.json").read_text()
    (saved / "index.json").write_text(text.replace("nobody", "nobopy"))  # now it is
    assert len(checkpoint.move_damaged_aside(saved.parent)) == 1


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


def save_one(folder, step, values=None, **options):
    values = values or state(step)
    tensors = {path: x for path, (x, _) in values.items()}
    specs, shapes = dict.fromkeys(tensors, P()), {path: tuple(x.shape) for path, x in tensors.items()}
    extras = options.pop("extras", {})
    return checkpoint.save(folder, step, tensors, specs, Mesh(), 0, shapes, extras, SaveOptions(**options))


def test_remains_of_killed_saves(tmp_path):
    """What killed saves leave behind is no checkpoint, and the next save of that step neither uses nor keeps it."""
    save_one(tmp_path, 1)
    for name in (".step_00000002.a-1.partial", ".step_00000002.a-2.failed", ".step_00000003.partial", ".step_00000000.deleted"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
        (tmp_path / name / "rank-00000.json").write_text("{}")
    assert checkpoint.available(tmp_path) == [tmp_path / "step_00000001"]
    save_one(tmp_path, 2)
    checkpoint.verify(tmp_path / "step_00000002")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_fails_keeps_nobody_waiting(broken, tmp_path):
    """A wrong shard on one rank: all ranks get an error, none hangs, rank 0's names the rank, the old one stays."""
    save_all(tmp_path, 1, state(), MESH)

    def save(rank, run):
        local = torch.zeros(4 if rank == broken else 2)
        return checkpoint.save(tmp_path, 2, {"x": local}, {"x": P("tp")}, MESH, rank, {"x": (4,)}, {}, SaveOptions(run, Keep(1)))

    errors = on_all_ranks(MESH.size, save)
    assert [type(error) for error in errors] == [CheckpointError] * 4
    assert "the local shape is (4,), but (4,) by P('tp') gives (2,)" in str(errors[broken])
    assert f"rank {broken}" in str(errors[0])
    assert checkpoint.available(tmp_path) == [tmp_path / "step_00000001"]


def test_an_error_while_writing(tmp_path, monkeypatch):
    """A full disk is an error of every rank, rank 0 lists whose disk it was, and there is no checkpoint."""

    def full(*_, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mpar.checkpoint._saver.write_shards", full)
    errors = save_all(tmp_path, 2, state(), MESH)
    assert [type(error) for error in errors] == [CheckpointError] * 4
    for rank in (0, 1):  # the others have nothing to write
        assert f"rank {rank}: OSError: [Errno 28] No space left" in str(errors[0])
    assert checkpoint.latest(tmp_path) is None


def test_a_tensor_that_no_rank_holds_whole(tmp_path):
    """If a stage's part is missing the save fails and says which tensor is not covered."""

    def save(rank, run):
        tensors = {"x": torch.zeros(2)} if rank == 0 else {}
        given = dict.fromkeys(tensors, P("tp")), MESH, rank, dict.fromkeys(tensors, (4,))
        return checkpoint.save(tmp_path, 2, tensors, *given, {}, SaveOptions(run))

    errors = on_all_ranks(MESH.size, save)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "x: 1 shards of shape (2,) with 1 checksums do not cover (4,): 2 were expected" in str(errors[0])


def test_all_wrong_arguments_in_one_error(tmp_path):
    """Names that disagree, a pending sum, a dtype that cannot be saved, and extras that are not JSON come together."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex64)}
    specs = {"b": P(partial="tp"), "c": P(), "d": P()}
    extras = {"position": torch.tensor(3), "loss": float("nan"), "ids": {1: 2}, "fine": [1, None, "x", True, 2.5]}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(
            tmp_path, -1, tensors, specs, Mesh(tp=1), 0, dict.fromkeys("abc", (2,)), extras, SaveOptions(keep=Keep(0))
        )
    message = str(caught.value)
    for part in (
        "a: is not in specs",
        "b by P(partial='tp'): is a pending sum",
        "c: dtype torch.complex64 cannot be saved",
        "d: is not in tensors nor in shapes",
        "extras.position: a Tensor is not a JSON value",
        "extras.loss: nan",
        "extras.ids: key 1",
        "step must not be negative, and is -1",
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


def test_latest_and_available(tmp_path):
    """Order is by step, not by name or time; folders without index, with a missing file or another name do not count."""
    assert checkpoint.latest(tmp_path / "absent") is None and checkpoint.available(tmp_path / "absent") == []
    for step in (100_000_000, 9, 20, 30, 40):
        save_one(tmp_path, step)
    (tmp_path / "step_00000030" / "index.json").unlink()
    (tmp_path / "step_00000040" / "rank-00000.safetensors").unlink()
    shutil.copytree(tmp_path / "step_00000020", tmp_path / "step_copy")
    (tmp_path / "step_00000050").write_text("a file")
    names = [path.name for path in checkpoint.available(tmp_path)]
    assert names == ["step_00000009", "step_00000020", "step_100000000"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_100000000"


def test_keep_deletes_the_oldest_complete_ones_only(tmp_path):
    """keep=2 leaves the two highest steps and what it does not know; the one just saved stays even if its step is low."""
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    (tmp_path / "step_00000002" / "index.json").unlink()
    save_one(tmp_path, 4, keep=Keep(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000004"]
    save_one(tmp_path, 1, keep=Keep(2))
    assert [path.name for path in checkpoint.available(tmp_path)] == ["step_00000001", "step_00000003", "step_00000004"]


def test_old_ones_are_deleted_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    """At the moment of the first deletion the new checkpoint is the latest, and verifies."""
    save_one(tmp_path, 1)
    seen = []
    remove = _folders.remove_folder

    def watch(path):
        seen.append((os.path.basename(path), checkpoint.latest(tmp_path)))
        if "deleted" in os.path.basename(path):
            checkpoint.verify(tmp_path / "step_00000002")
        remove(path)

    monkeypatch.setattr(_folders, "remove_folder", watch)
    save_one(tmp_path, 2, keep=Keep(1))
    assert (".step_00000001.deleted", tmp_path / "step_00000002") in seen
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    """The save succeeds if an old checkpoint cannot be deleted, and says so."""
    save_one(tmp_path, 1)

    def refuse(path):
        raise PermissionError(f"not {path}")

    monkeypatch.setattr(_folders, "remove_folder", refuse)
    with pytest.warns(UserWarning, match=re.escape("cannot delete old checkpoints")):
        path = save_one(tmp_path, 2, keep=Keep(1))
    assert checkpoint.latest(tmp_path) == path
