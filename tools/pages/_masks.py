"""Comparing what a page shows with what was printed: lines `...` and words `[...]` of the page stand for anything."""

import difflib
import re

__all__ = ["differences", "renewed", "same"]

ANY_LINES, ANY_WORDS = "...", "[...]"


def same(shown: str, printed: str) -> bool:
    """Whether `printed` is what a page shows. Spaces at the ends of lines do not count."""
    pattern = "".join(_pattern(line) for line in _lines(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def differences(shown: str, printed: str) -> str:
    """A diff of the lines that are shown and those that were printed, with one line of context."""
    return "\n".join(difflib.unified_diff(_lines(shown), _lines(printed), "shown", "printed", lineterm="", n=1))


def renewed(shown: str, printed: str) -> str:
    """What a page should show now: its own lines and masks where they still fit, and elsewhere the most similar printed lines.

    If that would not match what was printed, it is all that was printed.
    """
    if same(shown, printed):
        return shown
    remaining, kept = _lines(printed), []
    for line in _lines(shown):
        if line.strip() == ANY_LINES:
            kept.append(line)
            continue
        at = next((i for i, now in enumerate(remaining) if re.fullmatch(_pattern(line), now + "\n")), None)
        if at is None:
            near = difflib.get_close_matches(line, remaining, n=1, cutoff=0.5)
            at = remaining.index(near[0]) if near else None
            line = near[0] if near else line
        if at is not None:
            kept.append(line)
            remaining = remaining[at + 1 :]
    text = "".join(f"{line}\n" for line in kept)
    return text if same(text, printed) else "".join(f"{line}\n" for line in _lines(printed))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _pattern(line: str) -> str:
    if line.strip() == ANY_LINES:
        return r"(?:.*\n)*?"
    return ".*?".join(re.escape(part) for part in line.split(ANY_WORDS)) + r"\n"
