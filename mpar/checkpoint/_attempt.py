"""An attempt to save: how ranks learn from the shared file system, and from nothing else, what became of it.

Every rank writes its shards and then a report into the partial folder of the attempt. Rank 0 waits for all reports. It then makes
the checkpoint by renaming the folder, or gives up by renaming it to a name that says so; the others wait for one of the two. The
folder has the name of the attempt in its own, so nothing that an earlier attempt left behind can be taken for a part of this one.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpar.checkpoint._disk import make_folder, write_text
from mpar.checkpoint._folders import checkpoint_name
from mpar.checkpoint._index import Written, written_from_json
from mpar.checkpoint._layout import file_name
from mpar.errors import CheckpointError, NumericsError

__all__ = ["Attempt"]

_GRACE_S = 0.5  # after the first failure, for other ranks that are about to report theirs
_PAUSE_SHARE = 0.02  # of the time waited so far: so much longer a save may take because ranks look only now and then
_LONGEST_PAUSE_S = 1.0
_NOTE = "failed.json"
_KINDS = {kind.__name__: kind for kind in (CheckpointError, NumericsError)}

Failure = CheckpointError | NumericsError


@dataclass(frozen=True)
class Attempt:
    """The attempt called `name` to save `step` into `folder`, by `num_ranks` ranks.

    timeout_s: for so long the files of the attempt may stay as they are before whoever waits says which ranks are missing.
    """

    folder: Path
    step: int
    name: str
    num_ranks: int
    timeout_s: float

    @property
    def final(self) -> Path:
        """The folder that the checkpoint will be."""
        return self.folder / checkpoint_name(self.step)

    @property
    def partial(self) -> Path:
        """The folder in which it is written."""
        return self.folder / f".{checkpoint_name(self.step)}.{self.name}.partial"

    @property
    def failed(self) -> Path:
        """What that folder is called once rank 0 has given up."""
        return self.partial.with_suffix(".failed")

    def make(self) -> None:
        """Make the partial folder. Raises the failure if rank 0 has given up already."""
        if self.failed.is_dir():
            self.await_outcome()
        make_folder(self.partial)

    def report(self, rank: int, shards: Mapping[str, Written]) -> None:
        """Tell rank 0 what this rank has written."""
        write_text(self.report_file(rank), json.dumps({"shards": {name: asdict(written) for name, written in shards.items()}}))

    def report_failure(self, rank: int, failure: Failure) -> None:
        """Tell rank 0 why this rank cannot write. If even that is impossible, rank 0 will see that the report is missing."""
        try:
            self.shards_file(rank).unlink(missing_ok=True)  # a full disk then has room for the report
            self.make()
            write_text(self.report_file(rank), json.dumps(_as_json(failure)))
        except (OSError, CheckpointError, NumericsError):
            return

    def collect(self, at_rank_0: Failure | None) -> list[dict[str, Written]]:
        """On rank 0: wait for the reports of all ranks. Raises what went wrong, with the failures that ranks reported.

        at_rank_0: the failure of rank 0, which the disk may have kept it from reporting.
        """
        reports: dict[int, Any] = {} if at_rank_0 is None else {0: _as_json(at_rank_0)}
        failed_at = [float("inf")]

        def done() -> bool:
            present = set(os.listdir(self.partial)) if self.partial.is_dir() else set()
            for rank in range(self.num_ranks):
                if rank not in reports and self.report_file(rank).name in present:
                    reports[rank] = json.loads(self.report_file(rank).read_text(encoding="utf-8"))
            if any("failure" in report for report in reports.values()):
                failed_at[0] = min(failed_at[0], time.monotonic())
            return len(reports) == self.num_ranks or time.monotonic() > failed_at[0] + _GRACE_S

        self._wait(done)
        failures = {rank: _from_json(report) for rank, report in sorted(reports.items()) if "failure" in report}
        if failures:
            raise self.failure(failures)
        parts = [reports[rank]["shards"] for rank in range(self.num_ranks)]
        return [{name: written_from_json(written) for name, written in part.items()} for part in parts]

    def give_up(self, failure: Failure) -> None:
        """On rank 0: tell the other ranks, which wait for the outcome. The rename needs no room on the disk."""
        try:
            for rank in range(self.num_ranks):
                self.shards_file(rank).unlink(missing_ok=True)
            write_text(self.partial / _NOTE, json.dumps(_as_json(failure)))
        except OSError:
            pass  # then the others learn that it failed, but not why
        try:
            os.rename(self.partial, self.failed)
        except OSError:
            return  # then they learn it when their time is over

    def await_outcome(self) -> None:
        """On the other ranks: wait until rank 0 has made the checkpoint. Raises what went wrong if it has given up."""
        self._wait(lambda: self.final.is_dir() or self.failed.is_dir())
        if self.final.is_dir():
            return
        try:
            failure = _from_json(json.loads((self.failed / _NOTE).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            raise self.failure({}, [f"rank 0 gave up, and its reason cannot be read ({error})"]) from error
        raise failure

    def report_file(self, rank: int) -> Path:
        """Where a rank reports."""
        return self.partial / f"rank-{rank:05d}.json"

    def shards_file(self, rank: int) -> Path:
        """Where a rank writes its shards."""
        return self.partial / file_name(rank)

    def failure(self, failures: Mapping[int, Failure], problems: Sequence[str] = ()) -> Failure:
        """The error that says why there is no checkpoint: what failed on which rank, and further problems."""
        kind = NumericsError if any(isinstance(failure, NumericsError) for failure in failures.values()) else CheckpointError
        lines = [f"rank {rank}: {failure}" for rank, failure in failures.items()] + [*problems]
        joined = kind(f"cannot save {self.final}:\n  " + "\n  ".join(lines) + "\nOlder checkpoints are as before.")
        joined.__cause__ = next((failure.__cause__ for failure in failures.values() if failure.__cause__), None)
        return joined

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done`. Raises CheckpointError once nothing in the partial folder has changed for `timeout_s`."""
        began = since = asked = time.monotonic()
        seen = self._listing()
        while not done():
            now = time.monotonic()
            if now - asked > min(1.0, self.timeout_s / 4):
                asked, state = now, self._listing()
                if state != seen:
                    seen, since = state, now
                elif now - since > self.timeout_s:
                    raise self.failure({}, [self._missing()])
            time.sleep(min(max(0.001, _PAUSE_SHARE * (now - began)), _LONGEST_PAUSE_S))

    def _listing(self) -> list[tuple[str, int]] | None:
        try:
            with os.scandir(self.partial) as entries:
                return sorted((entry.name, entry.stat().st_size) for entry in entries)
        except OSError:  # removed or renamed, or a file has just gone
            return None

    def _missing(self) -> str:
        absent = [str(rank) for rank in range(self.num_ranks) if not self.report_file(rank).exists()]
        if not absent:
            return f"rank 0 has all reports, but did not finish: nothing was written for {self.timeout_s:g} s"
        shown = absent if len(absent) <= 8 else [*absent[:7], f"... {absent[-1]}"]
        return (
            f"no report from rank{'s' if len(absent) > 1 else ''} {', '.join(shown)}, and nothing was written for "
            f"{self.timeout_s:g} s. Is the folder on a file system that all ranks share?"
        )


def _as_json(failure: Failure) -> dict[str, str]:
    return {"failure": str(failure), "kind": type(failure).__name__}


def _from_json(raw: dict[str, str]) -> Failure:
    return _KINDS[raw["kind"]](raw["failure"])
