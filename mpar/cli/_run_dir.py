"""Where a run goes that was not told where to go."""

import datetime

__all__ = ["new_run_dir"]


def new_run_dir() -> str:
    """runs/<date>_<time>."""
    return f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
