"""Names of folders by the time, which no other run has."""

import datetime
import itertools
from pathlib import Path

__all__ = ["new_folder"]


def new_folder(prefix: str) -> Path:
    """A folder that did not exist before, `<prefix><date>_<time>`, with a number behind it if another run has taken that name."""
    name = f"{prefix}{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    for number in itertools.count(1):
        folder = Path(name if number == 1 else f"{name}_{number}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError
