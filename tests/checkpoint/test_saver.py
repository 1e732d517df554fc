"""Saving in the background, and which checkpoints stay."""

import os
import re
import threading

import numpy as np
import pytest
import torch

from mpar import checkpoint
from mpar.checkpoint import Keep, SaveOptions, Saver, _write
from mpar.errors import CheckpointError, NumericsError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


def saver_of(folder, tensors, **options):
    leaves = {name: (tuple(x.shape), P(), x.dtype) for name, x in tensors.items()}
    return Saver(folder, leaves, Mesh(), 0, SaveOptions(**options))


def load(path, tensors):
    wanted = {name: (tuple(x.shape), P(), x.dtype) for name, x in tensors.items()}
    return checkpoint.load(path, wanted, Mesh(), 0)


@pytest.fixture
def held(monkeypatch):
    """An event without which no save writes its shards."""
    go_on, real = threading.Event(), _write.write_file

    def write_file(path, parts):
        assert go_on.wait(60)
        real(path, parts)

    monkeypatch.setattr(_write, "write_file", write_file)
    return go_on


def test_what_begin_was_given_may_be_overwritten(tmp_path, held):
    """`begin` returns before anything is written; the checkpoint has the values of that moment, of any strides."""
    tensors = {"w": torch.randn(64, 8), "t": torch.randn(8, 6).T, "b": torch.arange(5, dtype=torch.int8), "s": torch.tensor(2.5)}
    expected = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    saver = saver_of(tmp_path, tensors)
    saver.begin(1, tensors, {})
    assert saver.under_way and checkpoint.latest(tmp_path) is None
    for x in tensors.values():
        x.zero_()
    held.set()
    path = saver.wait()
    assert path == tmp_path / "step_00000001" and not saver.under_way
    assert all(same_bits(x, expected[name]) for name, x in load(path, tensors).items())


def test_one_save_at_a_time(tmp_path, held):
    """A save that begins while another is written waits for it, and says for how long; `wait` with a limit does not."""
    tensors = {"w": torch.ones(4)}
    saver = saver_of(tmp_path, tensors)
    assert saver.begin(1, tensors, {}) < 0.05
    assert saver.wait(0.01) is None
    threading.Timer(0.3, held.set).start()
    assert 0.2 < saver.begin(2, {"w": torch.zeros(4)}, {}) < 60
    saver.wait()
    assert [path.name for path in checkpoint.available(tmp_path)] == ["step_00000001", "step_00000002"]
    assert load(tmp_path / "step_00000001", tensors)["w"].tolist() == [1.0] * 4


def test_the_failure_of_a_save_is_raised_once(tmp_path, monkeypatch):
    """`check` raises it as soon as it is known, and the next save is a new attempt."""
    tensors = {"w": torch.ones(4)}
    saver, real = saver_of(tmp_path, tensors), os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.begin(1, tensors, {})
    with pytest.raises(CheckpointError, match=r"rank 0: OSError: \[Errno 28\] No space left on device"):
        while True:
            saver.check()
    monkeypatch.setattr(os, "fsync", real)
    saver.check()
    saver.begin(1, tensors, {})
    assert saver.wait() == tmp_path / "step_00000001"


def test_the_copy_is_kept(tmp_path):
    """All saves use the memory of the first, which has the size of the shards."""
    tensors = {"w": torch.ones(1000), "b": torch.ones(3, dtype=torch.bfloat16)}
    saver, places = saver_of(tmp_path, tensors), set()
    for step in (1, 2, 3):
        saver.begin(step, tensors, {})
        saver.wait()
        buffer = saver._staging.buffer
        places.add(np.frombuffer(buffer, np.uint8).ctypes.data)
        assert len(buffer) == 4006
    assert len(places) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_value_that_is_not_finite(dtype, tmp_path):
    """One NaN or infinity anywhere is an error that names step, rank and tensors, and leaves the older checkpoint; every finite
    value passes, the largest ones too."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    if dtype.itemsize == 1:
        every = torch.arange(2**8).to(torch.uint8).view(dtype)
    elif dtype.itemsize > 2:
        every = torch.tensor(
            [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).smallest_normal, -0.0], dtype=dtype
        )
    finite = every[torch.isfinite(every.double())]
    tensors = {"fine": finite, "w": torch.zeros(40_000, dtype=dtype), "ids": torch.full((3,), -1)}
    saver = saver_of(tmp_path, tensors, keep=Keep(1))
    saver.begin(1, tensors, {})
    saver.wait()
    bad = [torch.nan] if dtype == torch.float8_e4m3fn else [torch.nan, torch.inf, -torch.inf]
    for value, place in zip(bad, (39_999, 0, 35_000), strict=False):
        wrong = torch.zeros(40_000)
        wrong[place] = value
        saver.begin(2, tensors | {"w": wrong.to(dtype)}, {})
        with pytest.raises(NumericsError, match=r"(?s)step_00000002:.*rank 0: .*not finite in w \(40000,\)\n") as caught:
            saver.wait()
        assert "fine" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_ranks_need_a_run(tmp_path):
    """Two ranks without the name of a run would find each other's remains: refused."""
    saver = Saver(tmp_path, {}, Mesh(dp=2), 1)
    with pytest.raises(CheckpointError, match="2 ranks need the name of a run"):
        saver.begin(1, {}, {})


KEPT = {
    Keep(): [1, 2, 3, 4, 5, 6],
    Keep(2): [5, 6],
    Keep(1, every=3): [3, 6],
    Keep(1, best=2): [2, 4, 6],
    Keep(1, every=5, best=1): [2, 5, 6],
}
LOSSES = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 2.5, 6: 4.0}


@pytest.mark.parametrize("keep", KEPT, ids=str)
def test_what_is_kept(keep, tmp_path):
    """The newest, those of every so many steps, and the best of those that were evaluated."""
    tensors = {"w": torch.ones(2)}
    saver = saver_of(tmp_path, tensors, keep=keep)
    for step, loss in LOSSES.items():
        saver.begin(step, tensors, {} if loss is None else {checkpoint.LOSS: loss})
    saver.wait()
    assert [path.name for path in checkpoint.available(tmp_path)] == [f"step_{step:08d}" for step in KEPT[keep]]


def test_nothing_is_deleted_unless_the_new_one_is_complete(tmp_path):
    """A new checkpoint that the disk has lost at once costs no older one."""
    tensors = {"w": torch.ones(2)}
    saver = saver_of(tmp_path, tensors)
    for step in (1, 2):
        saver.begin(step, tensors, {})
    new = saver.wait()
    os.truncate(new / "rank-00000.safetensors", 3)
    checkpoint._folders.prune(tmp_path, Keep(1), new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_wrong_numbers_of_keep(tmp_path):
    """All of them come in one error."""
    saver = saver_of(tmp_path, {}, keep=Keep(0, 0, -1))
    with pytest.raises(CheckpointError) as caught:
        saver.begin(1, {}, {})
    for name, value in (("keep", 0), ("keep_every", 0), ("keep_best", -1)):
        assert re.search(rf"\b{name} must be at least 1, not {value}", str(caught.value))
