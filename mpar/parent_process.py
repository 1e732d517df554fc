"""A process ends with the one that started it, however that one ended."""

import ctypes
import os
import signal
import threading
import time

__all__ = ["end_with_parent"]

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_LOOK_S = 1.0


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when the process `parent`, which started it, ends.

    The kernel sends the signal when the thread ends that started this process. A thread looks for the same once a second, for
    systems without prctl and for wrappers between the two processes that take the signal away.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    if os.getppid() != parent:  # it ended before this process could ask for the signal
        os._exit(1)
    threading.Thread(target=look, daemon=True).start()
