"""Writes pictures of programs into files. The suffix decides: a page, a drawing, or a trace for a viewer."""

import json
from collections.abc import Sequence
from pathlib import Path

from mpar.errors import ConfigError
from mpar.schedules import Picture, chrome_trace, html, svg

__all__ = ["SUFFIXES", "check_suffix", "write_pictures"]

SUFFIXES = {
    ".html": "a page to zoom into",
    ".svg": "a drawing",
    ".json": "a trace for chrome://tracing or Perfetto",
}


def check_suffix(file: str, several: bool) -> None:
    """Raise ConfigError if the suffix of `file` is unknown, or if it cannot hold `several` pictures, as only a page can."""
    suffix = Path(file).suffix
    if suffix not in SUFFIXES:
        known = ", ".join(f"{name} ({about})" for name, about in SUFFIXES.items())
        raise ConfigError(f"cannot draw into plan.timeline={file}: its suffix is {suffix or 'missing'!r}; there are {known}")
    if several and suffix != ".html":
        raise ConfigError(f"cannot draw several schedules into plan.timeline={file}: only .html holds more than one picture")


def write_pictures(file: str, pictures: Sequence[Picture], title: str) -> None:
    """Write `pictures` into `file` as its suffix says. Call `check_suffix` before."""
    path = Path(file)
    if path.suffix == ".html":
        text = html(pictures, title)
    elif path.suffix == ".svg":
        text = svg(pictures[0])
    else:
        text = json.dumps(chrome_trace(pictures[0]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write plan.timeline={file}: {error.strerror}") from None
