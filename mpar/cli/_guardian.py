"""Waits until standard input ends, then deletes a folder. It is a process of its own, so that the folder is also deleted when the
process that made it was killed. Run by its path, because it imports nothing of mpar: `python -I -S _guardian.py FOLDER`."""

import shutil
import signal
import sys
import time
from pathlib import Path

_TRIES = 20  # ranks whose launcher was killed may write their places for a moment
_PAUSE_S = 0.5


def main(folder: Path) -> None:
    """Delete `folder` once nobody holds the other end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
