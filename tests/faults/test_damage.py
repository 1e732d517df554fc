"""Checkpoints that were damaged or edited, loaded on four meshes: some rank of each mesh refuses, in our words and at once.

`pytest tests/faults/test_damage.py` runs all of it; the broad tier takes a sample. What one rank of a mesh does not read,
another does, so a checkpoint counts as loaded silently if all ranks of a mesh load it.
"""

import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mpar import checkpoint
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import save_all
from tests.checkpoint.test_golden import GOLDEN, golden_state

SAVED_FROM = Mesh(fsdp=2, tp=2)
MESHES = [Mesh(fsdp=1, tp=1), Mesh(fsdp=2, tp=2), Mesh(fsdp=1, tp=4), Mesh(fsdp=4, tp=2)]
RANKS = [f"rank-{rank:05d}.safetensors" for rank in range(4)]
FILES = ["index.json", "state.json", *RANKS]
MOST_S = 5.0


@dataclass(frozen=True)
class Saved:
    """The checkpoint to damage, and two to take files from: of another run at the same step, of the same run at another step."""

    path: Path
    other_run: Path
    other_step: Path


Damage = Callable[[Saved, random.Random], object]


def state(seed: int) -> dict[str, tuple[torch.Tensor, P]]:
    """Tensors of several blocks to check and of few bytes, cut along one dim, the other, both or none."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "params.table_VD": (torch.randn(400, 256, generator=generator), P("tp")),
        "params.up_DF": (torch.randn(256, 512, generator=generator).bfloat16(), P("fsdp", "tp")),
        "opt.m.table_VD": (torch.randn(400, 256, generator=generator), P(None, "tp")),
        "opt.v.table_VD": (torch.randn(400, 256, generator=generator), P("fsdp")),
        "opt.count": (torch.tensor(20 + seed), P()),
        "mask": (torch.rand(24, generator=generator) > 0.5, P()),
    }


WANTED = {
    "params.table_VD": ((400, 256), P("fsdp", "tp"), torch.float32),
    "params.up_DF": ((256, 512), P(None, "tp"), torch.bfloat16),
    "opt.m.table_VD": ((400, 256), P(("fsdp", "tp")), torch.float32),
    "opt.v.table_VD": ((400, 256), P(None, "tp"), torch.float32),
    "opt.count": ((), P(), torch.int64),
    "mask": ((24,), P("tp"), torch.bool),
}
WANTED_1 = {
    name: (tuple(x.shape), P(("fsdp", "tp")) if x.shape == (8, 6) else P(), x.dtype) for name, (x, _) in golden_state().items()
}


# --- damage to bytes and files ------------------------------------------------------------------------------------------------


def flip(name: str, part: float) -> Damage:
    """Flip a random bit at about `part` of a file."""

    def damage(saved: Saved, draw: random.Random) -> None:
        content = bytearray((saved.path / name).read_bytes())
        place = min(len(content) - 1, int(part * len(content)) + draw.randrange(1 + len(content) // 16))
        content[place] ^= 1 << draw.randrange(8)
        (saved.path / name).write_bytes(content)

    return damage


def change_bytes(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Replace the content of a file."""
    return lambda saved, _: (saved.path / name).write_bytes(change((saved.path / name).read_bytes()))


def take(name: str, origin: str) -> Damage:
    """Take a file from another checkpoint."""
    return lambda saved, _: shutil.copyfile(getattr(saved, origin) / name, saved.path / name)


def exchange(one: str, other: str) -> Damage:
    """Let two files change names."""

    def damage(saved: Saved, _: random.Random) -> None:
        (saved.path / one).rename(saved.path / "kept")
        (saved.path / other).rename(saved.path / one)
        (saved.path / "kept").rename(saved.path / other)

    return damage


def no_file(name: str, kind: str) -> Damage:
    """Put something else in the place of a file."""

    def damage(saved: Saved, _: random.Random) -> None:
        target = saved.path / name
        target.rename(saved.path / "kept")
        if kind == "fifo":
            os.mkfifo(target)
        elif kind == "folder":
            target.mkdir()
        elif kind == "link":
            target.symlink_to(saved.path / "kept")
        elif kind == "zeros":
            try:
                os.mknod(target, 0o20666, os.makedev(1, 5))  # as /dev/zero is
            except OSError:  # only the superuser may
                target.symlink_to("/dev/zero")

    return damage


def bytes_and_files() -> Iterator[tuple[str, Damage]]:
    """Flips, cuts, additions, files that are missing, swapped, of another checkpoint, or no files."""
    for name in FILES:
        short = name.partition(".")[0]
        yield from ((f"flip {short} {part}", flip(name, part)) for part in (0.0, 0.02, 0.1, 0.3, 0.5, 0.8, 0.99))
        for label, size in (("empty", lambda n: 0), ("third", lambda n: n // 3), ("last", lambda n: n - 1)):
            yield f"cut {short} {label}", change_bytes(name, lambda content, size=size: content[: size(len(content))])
        yield f"add {short}", change_bytes(name, lambda content: content + b" ")
        yield f"terabyte {short}", lambda saved, _, name=name: os.truncate(saved.path / name, 2**40)
        yield f"drop {short}", lambda saved, _, name=name: (saved.path / name).unlink()
        yield from ((f"{kind} {short}", no_file(name, kind)) for kind in ("fifo", "folder", "link", "zeros"))
        yield from ((f"{short} of {origin}", take(name, origin)) for origin in ("other_run", "other_step"))
    yield from ((f"exchange {one} {other}", exchange(RANKS[one], RANKS[other])) for one, other in ((0, 1), (0, 2), (2, 3)))
    for swap in ((b"F32", b"I32"), (b"[0,", b"[8,"), (b'{\\"fsdp\\":2', b'{\\"fsdp\\":3'), (b"BF16", b"F16 ")):
        yield f"header {swap[1].decode()}", change_bytes(RANKS[0], lambda content, swap=swap: content.replace(*swap, 1))


# --- edits of the index, under a checksum that fits ---------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the index, and write it as it is written, with a checksum that fits."""

    def damage(saved: Saved, _: random.Random) -> None:
        body = json.loads((saved.path / "index.json").read_text())["index"]
        change(body)
        version1 = isinstance(body, dict) and body.get("files") is not None
        text = json.dumps(body, separators=(",", ":"))
        summed = json.dumps(body, separators=(",", ":"), sort_keys=True) if version1 else text
        (saved.path / "index.json").write_text(f'{{"crc32": {zlib.crc32(summed.encode())}, "index": {text}}}\n')

    return damage


def put(*keys: str | int, value: object) -> Damage:
    """Replace one value of the index."""

    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return edit(change)


def swap_within(*path: str | int, one: object, other: object) -> Damage:
    """Exchange two values in a table or list of the index."""

    def change(body: Any) -> None:
        for key in path:
            body = body[key]
        body[one], body[other] = body[other], body[one]

    return edit(change)


BAD_COUNTS = {"negative": -1, "bool": True, "float": 2.0, "huge": 2**80, "nested": [2], "text": "2", "null": None}
TABLE = ("tensors", "params.table_VD")
ESCAPES = ["../other_run/rank-00000.safetensors", "/etc/passwd", "rank-00000.safetensors/../../x", "..", "", "state.json"]


def edits() -> Iterator[tuple[str, Damage]]:
    """Values of wrong kinds everywhere, and right kinds that fit nothing."""
    for label, value in BAD_COUNTS.items():
        yield f"step {label}", put("step", value=value)
        yield f"version {label}", put("version", value=value)
        yield f"shape {label}", put(*TABLE, "shape", 0, value=value)
        yield f"block {label}", put(*TABLE, "block", 0, value=value)
        yield f"rank {label}", put(*TABLE, "ranks", 0, value=value)
        yield f"mesh {label}", put("mesh", "tp", value=value)
        yield f"state bytes {label}", put("state", "bytes", value=value)
    for key in ("step", "version", "mesh", "state", "tensors"):
        yield f"no {key}", edit(lambda body, key=key: body.pop(key))
        yield f"{key} list", put(key, value=[])
    for label, value in (("later", 21), ("zero", 0)):
        yield f"step {label}", put("step", value=value)
    for label, version in (("older", 1), ("newer", 3), ("zero", 0)):
        yield f"version {label}", put("version", value=version)
    yield "mesh of more", put("mesh", "tp", value=3)
    yield "mesh of less", put("mesh", "tp", value=1)
    yield "mesh of other axes", put("mesh", value={"tp": 2, "fsdp": 2})
    yield "state of no bytes", put("state", "bytes", value=0)
    yield "other checksum of the state", put("state", "checksum", value="0" * 16)
    yield "tensor dropped", edit(lambda body: body["tensors"].pop("opt.count"))
    yield "tensor added", put("tensors", "params.new", value={"shape": [2], "dtype": "int8", "block": [2], "ranks": [0]})
    yield "tensors exchanged", swap_within("tensors", one="opt.m.table_VD", other="opt.v.table_VD")
    yield "moments named as parameters", swap_within("tensors", one="params.table_VD", other="opt.v.table_VD")
    for label, shape in (("turned", [256, 400]), ("wider", [400, 512]), ("flat", [102400]), ("of a terabyte", [2**40, 2**40])):
        yield f"shape {label}", put(*TABLE, "shape", value=shape)
    yield "shape of 100 dims", put(*TABLE, "shape", value=[1] * 100)
    for label, block in (
        ("uneven", [150, 256]),
        ("turned", [400, 128]),
        ("half", [100, 256]),
        ("none", [0, 256]),
        ("flat", [200]),
    ):
        yield f"block {label}", put(*TABLE, "block", value=block)
    for dtype in ("int32", "float16", "float64", "complex64", "__class__", 3, None):
        yield f"dtype {dtype}", put(*TABLE, "dtype", value=dtype)
    for label, ranks in (
        ("exchanged", [1, 0]),
        ("twice", [0, 0]),
        ("dropped", [0]),
        ("out of range", [0, 9]),
        ("elsewhere", [2, 3]),
    ):
        yield f"ranks {label}", put(*TABLE, "ranks", value=ranks)
    yield "checksums exchanged", swap_within(*TABLE, "checksums", one=0, other=1)
    for label, sums in (("dropped", []), ("short", ["00", "00"]), ("zero", ["0" * 16] * 2), ("numbers", [1, 2]), ("text", "ab")):
        yield f"checksums {label}", put(*TABLE, "checksums", value=sums)
    for label, copies in (
        ("of nothing", [[9, 3]]),
        ("on no rank", [[0, 9]]),
        ("not there", [[0, 3]]),
        ("odd", [[0]]),
        ("text", "ab"),
    ):
        yield f"copies {label}", put(*TABLE, "copies", value=copies)
    yield "unknown key", put("files", value=None)
    yield "unknown key of a tensor", put(*TABLE, "file", value="../x")
    for label, name in (("path", "../x"), ("empty", ""), ("reserved", "__checksums__"), ("metadata", "__metadata__")):
        yield f"name {label}", edit(lambda body, name=name: body["tensors"].update({name: body["tensors"].pop("mask")}))
    yield "other spaces", change_bytes("index.json", lambda content: content.replace(b'"index": ', b'"index":  '))
    yield "a name twice", change_bytes("index.json", lambda content: content.replace(b'"step":20', b'"step":20,"step":20'))
    for label, content in (("deep", b"[" * 200_000), ("no table", b"[]"), ("digits", b"9" * 10_000), ("nan", b'{"index": NaN}')):
        yield f"index {label}", change_bytes("index.json", lambda _, content=content: content)
        yield f"state {label}", change_bytes("state.json", lambda _, content=content: content)


def edits_1() -> Iterator[tuple[str, Damage]]:
    """Edits of an index of version 1, which names files, keys and offsets itself."""
    shard = ("tensors", "params.embed.table_VD", "shards", 0)
    for number, escape in enumerate(ESCAPES):
        yield f"1 escape {number}", put(*shard, "file", value=escape)
        yield f"1 escape of a listed file {number}", edit(lambda body, escape=escape: body["files"].update({escape: 100}))
    for label, value in BAD_COUNTS.items():
        yield f"1 offset {label}", put(*shard, "offsets", 0, value=value)
        yield f"1 crc32 {label}", put(*shard, "crc32", value=value)
        yield f"1 size {label}", put("files", RANKS[0], value=value)
    for label, offsets in (("overlap", [4, 0]), ("gap", [2, 0]), ("out of range", [8, 0]), ("of other dims", [0])):
        yield f"1 offsets {label}", put(*shard, "offsets", value=offsets)
    yield "1 shard dropped", edit(lambda body: body["tensors"]["params.embed.table_VD"]["shards"].pop())
    yield (
        "1 shard twice",
        edit(lambda body: body["tensors"]["params.embed.table_VD"]["shards"].extend(body["tensors"]["mask"]["shards"])),
    )
    yield "1 other key", put(*shard, "key", value="opt.m.embed.table_VD")
    yield "1 other step", put("step", value=21)
    yield "1 other version", put("version", value=2)
    yield from ((f"1 flip {name.partition('.')[0]} {part}", flip(name, part)) for name in FILES[1:] for part in (0.1, 0.6, 0.95))


CASES_2 = dict([*bytes_and_files(), *edits()])
CASES_1 = dict(edits_1())


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Three checkpoints of version 2, and one of version 1."""
    folder = tmp_path_factory.mktemp("originals")
    extras = {"seed": 1, "config": {"lr": 1e-3}}
    saved = {
        "path": save_all(folder / "a", 20, state(0), SAVED_FROM, extras=extras)[0],
        "other_run": save_all(folder / "b", 20, state(1), SAVED_FROM, extras={**extras, "seed": 2})[0],
        "other_step": save_all(folder / "c", 21, state(2), SAVED_FROM, extras=extras)[0],
    }
    return {**saved, "version1": GOLDEN / "version1"}


def outcomes(path: Path, wanted: Any) -> Iterator[tuple[Mesh, list[str]]]:
    """For every mesh the errors of its ranks. Anything but a CheckpointError is raised."""
    for mesh in MESHES:
        errors = []
        for rank in range(mesh.size):
            began = time.monotonic()
            try:
                checkpoint.load(path, wanted, mesh, rank)
                checkpoint.read_extras(path)
            except CheckpointError as error:
                errors.append(str(error))
            assert time.monotonic() - began < MOST_S
        yield mesh, errors


@pytest.mark.parametrize("version", ["path", "version1"])
def test_what_is_not_damaged(version, originals):
    """All ranks of the four meshes load what is as it was saved."""
    wanted = WANTED if version == "path" else WANTED_1
    assert [errors for _, errors in outcomes(originals[version], wanted)] == [[]] * 4


@pytest.mark.cases(24)
@pytest.mark.parametrize("case", CASES_2)
def test_damaged(case, originals, tmp_path):
    """On each mesh at least one rank refuses, with a CheckpointError that names the folder, and nothing else is raised."""
    path = tmp_path / "step_00000020"
    shutil.copytree(originals["path"], path)
    CASES_2[case](Saved(path, originals["other_run"], originals["other_step"]), random.Random(case))
    silent = [mesh for mesh, errors in outcomes(path, WANTED) if not errors or not all(str(path) in error for error in errors)]
    assert not silent


@pytest.mark.cases(8)
@pytest.mark.parametrize("case", CASES_1)
def test_damaged_version_1(case, originals, tmp_path):
    """The same of a checkpoint of version 1."""
    path = tmp_path / "step_00000020"
    shutil.copytree(originals["version1"], path)
    CASES_1[case](Saved(path, path, path), random.Random(case))
    silent = [mesh for mesh, errors in outcomes(path, WANTED_1) if not errors or not all(str(path) in error for error in errors)]
    assert not silent


def test_there_are_enough_of_them():
    """At least 150, each under a name of its own."""
    assert len(CASES_2) >= 150
    assert len(CASES_2) == len([*bytes_and_files(), *edits()]) and len(CASES_1) == len(list(edits_1()))
