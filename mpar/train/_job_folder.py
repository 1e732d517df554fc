"""The files of a job in the folder that a launcher shares with its ranks. Importing this loads no torch.

The job itself does not say where the run writes, so that a kept job can be of several runs.
"""

import json
import os
from pathlib import Path

from mpar.errors import ConfigError
from mpar.kept_files import is_private

__all__ = ["DATA_FOLDER", "JOB_FILE", "MALFORMED_FILE", "read_private", "read_run_dir", "write_private", "write_run_dir"]

JOB_FILE = "job.plain"
DATA_FOLDER = "data"
"""Where tokenised data are, unless the configuration names another folder."""
MALFORMED_FILE = "malformed.jsonl"
"""The list of malformed rows, in run_dir."""
_RUN_DIR_FILE = "run_dir.json"


def write_run_dir(folder: Path, run_dir: str | None) -> None:
    """Note in the folder of a job where its run writes."""
    write_private(folder / _RUN_DIR_FILE, json.dumps(run_dir).encode())


def read_run_dir(folder: Path) -> str | None:
    """Where the run of the job in `folder` writes. Raises ConfigError as `read_private` does."""
    run_dir = json.loads(read_private(folder / _RUN_DIR_FILE))
    assert run_dir is None or isinstance(run_dir, str)
    return run_dir


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read and write."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def read_private(path: Path) -> bytes:
    """The content of a file. Raises ConfigError if another user could have written it."""
    with path.open("rb") as file:
        if not (is_private(os.fstat(file.fileno())) and is_private(path.parent.stat())):
            raise ConfigError(f"cannot read {path}: another user may have written it. Only its owner may be able to write it.")
        return file.read()
