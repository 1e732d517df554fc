"""The folder of a run that was given no `run_dir`."""

import datetime

__all__ = ["new_run_dir"]


def new_run_dir() -> str:
    """`runs/<date>_<time>`, by the present time."""
    return f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
