"""The list of malformed rows that a run leaves behind."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpar.data._documents import LoadReport
from mpar.errors import DataError

__all__ = ["write_malformed"]


def write_malformed(file: Path, reports: Sequence[LoadReport]) -> bool:
    """Write a line of JSON for each malformed row of `reports`: its `source`, `line` (0 for an entire file), `reason`, and its
    first characters as `text`. Returns whether there is any; if there is none, no file stays behind.

    Raises DataError if the file cannot be written.
    """
    rows = [row for report in reports for row in report.malformed]
    try:
        if not rows:
            file.unlink(missing_ok=True)
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=".malformed-", dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as lines:
            for row in rows:
                lines.write(json.dumps({"source": row.file, "line": row.line, "reason": row.reason, "text": row.text}) + "\n")
        os.chmod(draft, 0o644)
        os.replace(draft, file)
    except OSError as error:
        raise DataError(f"cannot write the list of malformed rows {file}: {error.strerror}. Choose another run_dir.") from None
    return True
