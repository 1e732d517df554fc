"""A disk that is watched: calls of `os` that change what is under a folder can be counted, refused, and recorded."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Change", "Refusal", "watched_disk"]


@dataclass(frozen=True)
class Change:
    """A call that changes the disk. op: create, truncate, write, fsync, rename, mkdir, unlink or rmdir. data: what it wrote."""

    op: str
    path: str
    target: str = ""
    data: bytes = b""


@dataclass
class Refusal:
    """Refuses the calls from number `first` on, `count` of them, with the error `number`."""

    first: int
    number: int = errno.EIO
    count: int = 1
    where: str = field(default="", compare=False)
    """What was refused first."""

    def __call__(self, index: int, change: Change) -> None:
        if self.first <= index < self.first + self.count:
            self.where = self.where or f"{change.op} {Path(change.path).name}"
            raise OSError(self.number, os.strerror(self.number))


@contextlib.contextmanager
def watched_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path, before: Callable[[int, Change], None] = lambda index, change: None
) -> Iterator[list[Change]]:
    """The changes of what is in `folder` or below, in order. `before` is called with the number of each call, and may raise."""
    lock, numbers, changes, open_files = threading.Lock(), itertools.count(), [], {}
    real = {name: getattr(os, name) for name in ("open", "close", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")}

    def note(change: Change, act: Callable[[], Any]) -> Any:
        with lock:  # the order of the list is that of the disk
            before(next(numbers), change)
            result = act()
            changes.append(change)
            return result

    def inside(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(folder))

    def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if not inside(path):
            return real["open"](path, flags, *args, **options)
        if flags & os.O_CREAT:
            change = Change("truncate" if os.path.exists(path) else "create", os.fspath(path))
            descriptor = note(change, lambda: real["open"](path, flags, *args, **options))
        else:
            descriptor = real["open"](path, flags, *args, **options)
        open_files[descriptor] = os.fspath(path)
        return descriptor

    def close(descriptor: int) -> None:
        open_files.pop(descriptor, None)
        real["close"](descriptor)

    def write(descriptor: int, data: Any) -> int:
        if descriptor not in open_files:
            return real["write"](descriptor, data)
        return note(Change("write", open_files[descriptor], data=bytes(data)), lambda: real["write"](descriptor, data))

    def fsync(descriptor: int) -> None:
        if descriptor not in open_files:
            return real["fsync"](descriptor)
        return note(Change("fsync", open_files[descriptor]), lambda: None)  # the tests need no real disk

    def on_path(op: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not inside(path):
                return real[op](path, *args, **options)
            target = os.fspath(args[0]) if op == "rename" else ""
            return note(Change(op, os.fspath(path), target), lambda: real[op](path, *args, **options))

        return call

    patched = {"open": open_, "close": close, "write": write, "fsync": fsync}
    patched |= {op: on_path(op) for op in ("rename", "mkdir", "unlink", "rmdir")}
    with monkeypatch.context() as patch:
        for name, function in patched.items():
            patch.setattr(os, name, function)
        yield changes
