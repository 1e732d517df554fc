"""The list of malformed rows that a run leaves behind."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpar.data._documents import DESCRIBED_ROWS, LoadReport
from mpar.data.rows import BadRow
from mpar.errors import DataError

__all__ = ["MalformedFile", "write_malformed"]


def write_malformed(file: Path, reports: Sequence[LoadReport]) -> bool:
    """Write a line of JSON for each malformed row of `reports`: its `source`, `line` (0 for an entire file), `reason`, and its
    first characters as `text`. Returns whether there is any; if there is none, no file stays behind.

    Raises DataError if the file cannot be written.
    """
    lines = [_line(row) for report in reports for row in report.malformed]
    _write(file, lines)
    return bool(lines)


class MalformedFile:
    """The same list of a stream, which grows as the stream is read. num_before: malformed rows before its rows are read on, whose
    lines stay if the file has them."""

    def __init__(self, file: Path, num_before: int) -> None:
        self._file, self._num_written = file, 0
        try:
            lines = file.read_text(encoding="ascii", errors="replace").splitlines(keepends=True) if file.is_file() else []
        except OSError as error:
            raise _unwritable(file, error) from None
        self._num_lines = min(len(lines), num_before)
        _write(file, lines[: self._num_lines])

    def add_new(self, report: LoadReport) -> None:
        """Add the rows that the report describes and did not when it was last added, up to ten thousand in all.

        Raises DataError if the file cannot be written.
        """
        new = report.malformed[self._num_written :][: DESCRIBED_ROWS - self._num_lines]
        self._num_written = len(report.malformed)
        if new:
            self._num_lines += len(new)
            try:
                with self._file.open("a", encoding="ascii") as file:
                    file.writelines(map(_line, new))
            except OSError as error:
                raise _unwritable(self._file, error) from None


def _line(row: BadRow) -> str:
    return json.dumps({"source": row.file, "line": row.line, "reason": row.reason, "text": row.text}) + "\n"


def _write(file: Path, lines: Sequence[str]) -> None:
    """Make `lines` the whole of a file, all at once; without lines, no file stays behind."""
    try:
        if not lines:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=".malformed-", dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as written:
            written.writelines(lines)
        os.chmod(draft, 0o644)
        os.replace(draft, file)
    except OSError as error:
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> DataError:
    return DataError(f"cannot write the list of malformed rows {file}: {error.strerror}. Choose another run_dir.")
