"""A pause of the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """For code that makes hundreds of thousands of small tuples, none part of a cycle: looking for cycles takes half its time.

    What was made counts as old afterwards, so that the next collection of young objects does not begin with all of it. Objects
    that somebody has frozen stay frozen: then nothing is aged.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
