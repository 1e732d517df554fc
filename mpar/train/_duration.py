"""Durations as people write them: `3h55m`, `90s`, `2d`, or a number of seconds."""

import re
import time

from mpar.errors import ConfigError

__all__ = ["deadline_after", "seconds"]

_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_WRITTEN = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(duration: str | float) -> float:
    """The seconds of a duration, which is above zero. Raises ConfigError."""
    text = str(duration).replace(" ", "")
    match = _WRITTEN.fullmatch(text)
    if match is not None and text:
        total = sum(float(number) * unit for number, unit in zip(match.groups(), _UNITS_S.values(), strict=True) if number)
    else:
        try:
            total = float(text)
        except ValueError:
            total = 0.0
    if not 0 < total < float("inf"):
        raise ConfigError(
            f"cannot read the duration {duration!r}: it must be above zero, with the units d, h, m and s, such as 3h55m or 90s; "
            "a number alone is seconds."
        )
    return total


def deadline_after(limit: str | float | None) -> float | None:
    """The time since the epoch, in seconds, at which a run that begins now is over; None without a limit. Raises ConfigError."""
    return None if limit is None else time.time() + seconds(limit)
