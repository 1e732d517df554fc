"""How docstrings are shown on the site: fields, `name:  meaning`, become items of a list; other indented text stays as it is."""

import re
from collections.abc import Iterator

from griffe import Extension, Object

__all__ = ["FieldLists", "as_markdown"]

FIELD = re.compile(r"^(?P<names>`?\w[\w.]*`?(?:(?:, | / )`?\w[\w.]*`?)*):\s+(?P<meaning>\S.*)$")


class FieldLists(Extension):
    """An extension of griffe that changes every docstring when it is read."""

    def on_instance(self, *, obj: Object, **kwargs: object) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring whose fields are items of a list."""
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    in_field = False
    previous = ""
    for line in lines:
        match = FIELD.match(line)
        starts = match is not None and (in_field or not previous.strip())
        if starts and match is not None:
            if not in_field:
                yield ""
            yield f"- `{match['names'].replace('`', '')}`: {match['meaning']}"
        elif in_field and line.startswith(" ") and line.strip():
            yield f"  {line.strip()}"
        else:
            if in_field and line.strip():
                yield ""
            yield line
        in_field = starts or (in_field and line.startswith(" ") and bool(line.strip()))
        previous = line
