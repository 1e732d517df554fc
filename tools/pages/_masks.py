"""What a page shows beside what was printed: lines `...` and words `[...]` stand for anything."""

import difflib
import re

__all__ = ["differences", "renewed", "same"]

ANY_LINES, ANY_WORDS = "...", "[...]"


def same(shown: str, printed: str) -> bool:
    """Whether `printed` is what a page shows, spaces at the ends of lines apart."""
    pattern = "".join(_pattern(line) for line in _lines(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def differences(shown: str, printed: str) -> str:
    """The lines that are shown and those that were printed, as a diff without those that agree."""
    return "\n".join(difflib.unified_diff(_lines(shown), _lines(printed), "shown", "printed", lineterm="", n=1))


def renewed(shown: str, printed: str) -> str:
    """What a page is to show now: what was printed, with the masks of lines that are otherwise as they were."""
    if same(shown, printed):
        return shown
    masked = [line for line in _lines(shown) if ANY_WORDS in line]
    out = []
    for line in _lines(printed):
        mask = next((mask for mask in masked if re.fullmatch(_pattern(mask), line + "\n")), None)
        out.append(mask or line)
    return "".join(f"{line}\n" for line in out)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _pattern(line: str) -> str:
    if line.strip() == ANY_LINES:
        return r"(?:.*\n)*?"
    return ".*?".join(re.escape(part) for part in line.split(ANY_WORDS)) + r"\n"
