"""Arguments as people write them: texts with any characters, dashes, values without a key."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpar.cli._bind import TextKey, nearest
from mpar.cli._elsewhere import not_there

__all__ = ["cannot_read", "quote_texts", "without_dashes"]

_KEY_VALUE = re.compile(r"(?P<key>[+]{0,2}(?P<name>[\w.]+))=(?P<value>.*)", re.DOTALL)
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)

_ITEM = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]+)""", re.DOTALL)


def quote_texts(overrides: Iterable[str], texts: Mapping[str, TextKey]) -> Iterator[str]:
    """`overrides` with quotes around every text, so that Hydra takes its characters as they are.

    texts: the keys whose values are texts. In those that are no prose `${key}` still stands for the value of a key. `null`, a
    list, and a text that is in quotes already, stay as they are.
    """
    for argument in overrides:
        match = _KEY_VALUE.fullmatch(argument)
        if match is None or match["name"] not in texts:
            yield argument
            continue
        value, text = match["value"], texts[match["name"]]
        if text.is_list:
            bare = value.startswith("[") and value.endswith("]")
            yield f"{match['key']}=[{','.join(map(_quoted_item, _ITEM.findall(value[1:-1])))}]" if bare else argument
            continue
        is_list = text.may_be_list and value.startswith("[") and value.endswith("]")
        as_it_is = value == "null" or is_list or _QUOTED.fullmatch(value)
        yield argument if as_it_is else f"{match['key']}={_quoted(value, prose=text.prose)}"


def _quoted_item(item: str) -> str:
    """An item of a list of texts, in quotes if it has none."""
    item = item.strip()
    return item if _QUOTED.fullmatch(item) or item[:1] in ("[", "{") else _quoted(item, prose=False)


def _quoted(text: str, *, prose: bool) -> str:
    """`text` in the single quotes of Hydra, which read a backslash only before a quote."""
    if prose:
        text = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text)
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
    return f"'{text}'"


def without_dashes(overrides: Sequence[str], keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that are `key=value`, and a line for each that is not, with how it is written."""
    kept, problems, remaining = [], [], list(overrides)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("-") and ("=" in argument or argument.startswith("~")):
            kept.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        follows = remaining and not equals and "=" not in remaining[0] and not re.match(r"-+[A-Za-z]", remaining[0])
        if follows and (argument.startswith("-") or name in keys):
            value = remaining.pop(0)
            argument = f"{argument} {value}"
        problems.append(f"{argument}: {_as_key(name, value, keys)}")
    return kept, problems


def _as_key(name: str, value: str, keys: Sequence[str]) -> str:
    name = name.replace("-", "_")
    missing = not_there(name)
    if missing:
        return missing
    turned_off = name.startswith("no_") and name[3:] in keys
    key = name[3:] if turned_off else name if name in keys else nearest(name, keys)
    if key == "resume" and not value:
        return "a run goes on from its newest checkpoint by itself: give its run_dir=FOLDER (resume=auto is the default)"
    return f"must be key=value or group=choice, without dashes; write {key}={value or ('false' if turned_off else '...')}"


def cannot_read(argument: str, reason: str) -> str:
    """What to say of an argument that Hydra cannot read, `reason` being what Hydra says."""
    first = "it has a character that means something else" if "Lexer" in reason else reason.strip().splitlines()[0].rstrip(".")
    return (
        f"{argument}: cannot be read ({first}). A list is [a,b], a dict {{a: 1}}; put quotes around texts with other characters, "
        "inside those of the shell: 'key=\"a, b\"'"
    )
