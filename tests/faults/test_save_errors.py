"""A disk that fails during a save: whichever call it refuses, a readable checkpoint stays, nobody hangs, the error is named."""

import errno
import re
import time

import pytest

from mpar.checkpoint import Keep, _attempt
from mpar.errors import CheckpointError
from tests.faults.disk import Refusal, watched_disk
from tests.faults.saves import newest_readable, on_ranks, savers, shards

HANG_S = 30.0


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """Rank 0 waits less long for a second failure, so that the tests take less time."""
    monkeypatch.setattr(_attempt, "_GRACE_S", 0.02)


def save(saver, step, rank, mode):
    """As a run does: at once, or at the end of a later step."""
    saver.begin(step, shards(step, rank), {"step": step})
    if mode == "async":
        while saver.under_way:
            time.sleep(0.001)
        saver.check()
    return saver.wait()


def stride(request, quick):
    """Which calls a tier refuses: the full tier all of them."""
    return 1 if request.config.option.full else quick


def count_changes(tmp_path, monkeypatch):
    """How many changes of the disk a save takes that follows another one, which it deletes."""
    folder = tmp_path / "count" / "checkpoints"
    made = savers(folder, keep=Keep(1))
    on_ranks(lambda rank: save(made[rank], 1, rank, "sync"))
    with watched_disk(monkeypatch, folder.parent) as changes:
        on_ranks(lambda rank: save(made[rank], 2, rank, "sync"))
    assert newest_readable(folder) == 2
    return len(changes)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_refused_call(number, mode, tmp_path, monkeypatch, request):
    """Each change that a save of two ranks makes is refused once, in turn: the newest checkpoint is the new one or the one
    before, all ranks know what failed unless the new one is there, and the next save succeeds."""
    total = count_changes(tmp_path, monkeypatch)
    assert total > 25
    for index in range(0, total, stride(request, 3)):
        folder = tmp_path / f"{index}" / "checkpoints"
        made = savers(folder, timeout_s=HANG_S, keep=Keep(1))
        on_ranks(lambda rank: save(made[rank], 1, rank, mode))  # noqa: B023
        refusal, began = Refusal(index, number), time.monotonic()
        with watched_disk(monkeypatch, folder.parent, refusal):
            found = on_ranks(lambda rank: save(made[rank], 2, rank, mode))  # noqa: B023
        assert time.monotonic() - began < HANG_S, refusal.where
        failed = [error for error in found if isinstance(error, CheckpointError)]
        newest = newest_readable(folder)
        assert newest in (1, 2), refusal.where
        assert all(f"[Errno {number}]" in str(error) for error in failed), refusal.where
        assert len(failed) == len(found) or newest == 2, f"{refusal.where}: {found}"
        again = 2 if newest == 1 else 3
        on_ranks(lambda rank: save(made[rank], again, rank, mode))  # noqa: B023
        assert newest_readable(folder) == again, refusal.where


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:cannot delete old checkpoints")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_disk_that_stays_broken(number, tmp_path, monkeypatch, request):
    """From some call on every change is refused: nothing is lost, and all ranks give up, some only when their time is over."""
    total = count_changes(tmp_path, monkeypatch)
    for index in range(0, total, stride(request, 6)):
        folder = tmp_path / f"{index}" / "checkpoints"
        made = savers(folder, timeout_s=0.3, keep=Keep(1))
        on_ranks(lambda rank: save(made[rank], 1, rank, "sync"))  # noqa: B023
        refusal = Refusal(index, number, count=10**9)
        with watched_disk(monkeypatch, folder.parent, refusal):
            found = on_ranks(lambda rank: save(made[rank], 2, rank, "sync"))  # noqa: B023
        newest = newest_readable(folder)
        assert newest in (1, 2), refusal.where
        assert newest == 2 or all(isinstance(error, CheckpointError) for error in found), refusal.where


def test_a_rank_that_is_gone(tmp_path):
    """The others name it when their time is over; the checkpoint before stays."""
    made = savers(tmp_path, timeout_s=0.3)
    on_ranks(lambda rank: save(made[rank], 1, rank, "sync"))
    for gone, other in ((1, 0), (0, 1)):
        made = savers(tmp_path, timeout_s=0.3)
        with pytest.raises(CheckpointError, match=re.escape(f"no report from rank {gone}, and nothing was written for 0.3 s")):
            save(made[other], 2, other, "sync")
    assert newest_readable(tmp_path) == 1


def test_a_rank_that_was_late(tmp_path):
    """What a rank writes for a save that rank 0 has given up spoils none of the later ones."""
    made = savers(tmp_path, timeout_s=0.3)
    with pytest.raises(CheckpointError, match="no report from rank 1"):
        save(made[0], 1, 0, "sync")
    with pytest.raises(CheckpointError, match="no report from rank 1"):
        save(made[1], 1, 1, "sync")
    assert on_ranks(lambda rank: save(made[rank], 1, rank, "sync")) == [tmp_path / "step_00000001"] * 2
    assert newest_readable(tmp_path) == 1
