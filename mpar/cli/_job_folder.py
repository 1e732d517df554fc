"""The folder of a job: what a launcher hands to its ranks. Only this user can read it, and nothing of it outlives the run."""

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["job_folder"]


@contextmanager
def job_folder() -> Iterator[Path]:
    """A new private folder. It is deleted in the end, whatever the end is: another process watches over it (`_guardian.py`)."""
    folder = Path(tempfile.gettempdir(), f"mpar-{secrets.token_hex(16)}")
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_guardian.py")), str(folder)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True):
        folder.mkdir(mode=0o700)  # after its guardian has started: a signal in between leaves nothing
        yield folder
