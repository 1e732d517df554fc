"""Blocks of a stream that a process beside this one makes ahead."""

import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from mpar.data._block_folder import BlockFolder
from mpar.data._cache import Entry, entry_folder, load_entry
from mpar.data._cursor import Cursor
from mpar.data._make_ahead import Order
from mpar.data._stream_blocks import Stream
from mpar.errors import DataError, MparError

__all__ = ["MadeAhead"]

_LOOK_S = 0.002
_PATIENCE_S = 5.0  # for a process that was told to end
_numbers = itertools.count()


class MadeAhead:
    """The blocks of a stream, which a process makes ahead, on as many others as `config.workers` says. With `config.cache_dir`,
    all processes of the machine that read this stream share the blocks: only one of them makes them.

    The process starts with the first block that is asked for. It ends with `close`, with this object, or with this process.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream, self._reader = stream, f"{next(_numbers)}"
        self._folder: BlockFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def get(self, cursor: Cursor) -> Entry:
        """The block that begins at a cursor. Raises what making it raised, and DataError if the process was killed."""
        folder = self._folder or self._begin()
        folder.want(self._reader, cursor)
        key, path = folder.key_of(cursor), folder.entry_of(cursor)
        while True:
            found = load_entry(path, key)
            if isinstance(found, Entry):
                return found
            if found:
                shutil.rmtree(path, ignore_errors=True)  # it is damaged, so it has to be made once more
            self._check()
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the process. The blocks that it has made stay if the folder does."""
        if self._end is not None:
            self._end()
        self._folder = self._process = self._end = None

    def _begin(self) -> BlockFolder:
        config = self._stream.config
        key = f"{self._stream.fingerprint} {config.seed} {config.shuffle}"
        own = config.cache_dir is None
        if config.cache_dir is None:
            path = Path(tempfile.mkdtemp(prefix="mpar-stream-"))
        else:
            machine = os.uname().nodename  # readers find out whether others live, which they cannot on another machine
            shared = BlockFolder(Path(), f"{key} {machine}").key_of(self._stream.beginning)
            path = entry_folder(Path(config.cache_dir), shared)
            path = _made(path.with_name(f"stream-{path.name}"))
        self._folder = BlockFolder(path, key)
        command = [sys.executable, "-m", "mpar.data._make_ahead"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, self._process, self._folder, self._reader, os.getpid(), own=own)
        assert self._process.stdin is not None
        pickle.dump(Order(self._stream, path, key, config.workers), self._process.stdin)
        self._process.stdin.flush()
        return self._folder

    def _check(self) -> None:
        """Raise the error with which the process has ended, if it has."""
        process = self._process
        assert process is not None and process.stdout is not None
        if process.poll() is None:
            return
        content = process.stdout.read()
        self.close()
        error = pickle.loads(content) if content else None
        if isinstance(error, MparError):
            raise error
        raise DataError(
            f"cannot read the data: the process that makes blocks of rows ended with exit code {process.returncode}, perhaps "
            "because memory was short.\nWhat it printed is above. A smaller data.shuffle_rows takes less memory."
        )


def _made(path: Path) -> Path:
    """A folder that only this user can write, made if it is not there. Raises DataError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise DataError(f"cannot write blocks of rows into {path}: {error.strerror}. Choose another data.cache_dir.") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DataError(
            f"cannot write blocks of rows into {path}: others than you may write there. Choose another data.cache_dir."
        )
    return path


def _end(process: subprocess.Popen[bytes], folder: BlockFolder, reader: str, owner: int, *, own: bool) -> None:
    """End a process, unless a fork of the process that started it calls this. own: the folder is of this reader alone."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.stop_wanting(reader)
    if own:
        shutil.rmtree(folder.path, ignore_errors=True)
