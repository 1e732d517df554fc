"""The lock of a run_dir: one run at a time writes into it."""

import datetime
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpar.cli._new_folder import new_folder
from mpar.errors import ConfigError

__all__ = ["LOCK_NAME", "locked_run_dir"]

LOCK_NAME = "run.lock"
_SIGN_S = 10.0  # how often the holder gives a sign of life
_SILENCE_S = 60.0  # after so long without a sign, the holder on another machine is taken for dead


@contextmanager
def locked_run_dir(wanted: str | None) -> Iterator[tuple[Path, int]]:
    """(the folder of a run, the descriptor that holds its lock), which no other run has until this ends.

    wanted: the configured folder, which is made if it does not exist; None: a new one, `runs/<date>_<time>`.
    A process that inherits the descriptor holds the lock as long as it lives. A lock whose holder has ended is taken over.
    Raises ConfigError if another run holds the lock, or if the folder cannot be made or written.
    """
    folder, is_new = _make(wanted)
    try:
        descriptor = _take(folder)
        try:
            stop = threading.Event()
            threading.Thread(target=_give_signs, args=(descriptor, stop), daemon=True).start()
            yield folder, descriptor
        finally:
            stop.set()
            (folder / LOCK_NAME).unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        if is_new and not any(folder.iterdir()):  # the run ended before it wrote anything
            folder.rmdir()


def _make(wanted: str | None) -> tuple[Path, bool]:
    """The folder, and whether it was made now."""
    try:
        if wanted is not None:
            folder = Path(wanted)
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return folder, is_new
        return new_folder("runs/"), True
    except OSError as error:
        raise ConfigError(
            f"cannot write into run_dir={wanted or 'runs'}: {error.strerror}: {error.filename}.\nChoose another run_dir."
        ) from None


def _take(folder: Path) -> int:
    """Take the lock; returns the descriptor that holds it."""
    file = folder / LOCK_NAME
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write into run_dir={folder}: {error.strerror}: {file}.\nChoose another run_dir.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            raise _in_use(folder, holder) from None
        if not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat()):
            os.close(descriptor)  # the holder has deleted this file meanwhile
            continue
        holder = _read(descriptor)
        last_sign = os.fstat(descriptor).st_mtime
        os.utime(descriptor)
        silence_s = os.fstat(descriptor).st_mtime - last_sign  # both times are by the clock of the file system
        if holder and holder.get("host") != socket.gethostname() and silence_s < _SILENCE_S:  # not all file systems share flock
            os.utime(descriptor, (last_sign, last_sign))
            os.close(descriptor)
            raise _in_use(folder, holder)
        start = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": start}).encode(), 0)
        except OSError as error:
            file.unlink(missing_ok=True)
            os.close(descriptor)
            raise ConfigError(f"cannot write into run_dir={folder}: {error.strerror}: {file}.") from None
        return descriptor


def _read(descriptor: int) -> dict[str, object]:
    """What a lock says of its holder; empty if it says nothing that can be read."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(folder: Path, holder: dict[str, object]) -> ConfigError:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, started {holder.get('start', '?')}"
    return ConfigError(
        f"cannot train in run_dir={folder}: another run is writing into it ({who}).\n"
        f"Wait for it, stop it, or choose another run_dir. A run that was killed gives its lock back by itself; on another "
        f"machine after {_SILENCE_S:.0f} seconds."
    )


def _give_signs(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(_SIGN_S):
        os.utime(descriptor)
