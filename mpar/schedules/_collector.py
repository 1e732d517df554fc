"""Pauses the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector for code that makes hundreds of thousands of small tuples without cycles.

    Looking for cycles would take half of the time. Afterwards the new objects are moved to the oldest generation, so that the
    next collection of young objects does not go through all of them. If objects have been frozen, this is left out, as it would
    unfreeze them.
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
