"""Bounds on what composing a configuration may take: files of --config-dir can be made to grow without end."""

import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mpar.errors import ConfigError

__all__ = ["bounded"]

_TIME_S = 3.0  # of computing, not of waiting; an ordinary configuration takes a tenth of that
_MORE_BYTES = 2**29
_LINUX = sys.platform == "linux"  # where a process knows how much address space it has


class _TooLong(BaseException):
    """The time is over. No handler of errors on the way may take it for one of its own."""


@contextmanager
def bounded(user_dir: Path | None) -> Iterator[None]:
    """Raise ConfigError if what happens inside takes seconds of computing or half a GiB. Without files of the user there is no
    bound, nor outside the main thread, which alone can be interrupted.
    """
    if user_dir is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if _LINUX else 0
    wanted = used_bytes + _MORE_BYTES if _LINUX else soft
    before = signal.signal(signal.SIGVTALRM, _stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, _TIME_S)
        yield
    except (_TooLong, MemoryError, RecursionError) as error:
        reason = "it takes too long" if isinstance(error, _TooLong) else "it takes too much memory"
        raise ConfigError(
            f"cannot compose the configuration with the files in --config-dir {user_dir}: {reason}.\n"
            "Interpolations (`${...}`) or lists of defaults in them refer to each other, and so grow without end."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _TooLong
