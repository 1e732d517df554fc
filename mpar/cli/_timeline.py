"""Pictures of programs as files: a page, a drawing, or a trace for a viewer, by the file's suffix."""

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
    """Raise ConfigError unless pictures can be written to `file`; several of them only to a page."""
    suffix = Path(file).suffix
    if suffix not in SUFFIXES:
        known = ", ".join(f"{name} ({what})" for name, what in SUFFIXES.items())
        raise ConfigError(f"cannot draw into plan.timeline={file}: its suffix is {suffix or 'missing'!r}; there are {known}")
    if several and suffix != ".html":
        raise ConfigError(f"cannot draw several schedules into plan.timeline={file}: only .html holds more than one picture")


def write_pictures(file: str, pictures: Sequence[Picture], title: str) -> None:
    """Write them as the suffix says, which `check_suffix` has found possible."""
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
