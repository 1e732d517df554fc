"""Makes frozen dataclasses of a composed dict. One error lists every unknown key and every value of a wrong type."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from mpar.cli._elsewhere import aliases, key_elsewhere, not_there, value_elsewhere
from mpar.errors import ConfigError, UnknownNameError
from mpar.train import outside
from mpar.typed_values import converted, describe, options_of

__all__ = [
    "Check",
    "TextKey",
    "bind",
    "key_of_word",
    "known_keys",
    "listed",
    "nearest",
    "nearest_value",
    "no_such_key",
    "open_keys",
    "text_keys",
]

T = TypeVar("T")
_MOST_LINES = 18  # of a message
_LONGEST = 200  # characters of a value in a message


Check = Callable[[T], Iterable[str]]
"""What is wrong with a configuration whose values have the right types, as lines."""


@dataclasses.dataclass
class _Found:
    """What is wrong: unknown keys; values of a wrong type; values outside of their bounds."""

    unknown: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    outside: list[str] = dataclasses.field(default_factory=list)


def bind(cls: type[T], values: Mapping[str, object], check: Check[T] | None = None) -> T:
    """A `cls` made of `values`. Raises UnknownNameError if any key is unknown, ConfigError if only values are wrong; both errors
    list every problem, those that `check` finds included.
    """
    found = _Found()
    names = known_keys(cls)
    bound = _convert(cls, values, "", found)
    if found.unknown:
        lines = [f"{name}: no such key; {no_such_key(name, names)}" for name in found.unknown]
        raise UnknownNameError(f"the configuration has unknown keys:{listed([*lines, *found.wrong, *found.outside])}")
    problems = [*found.wrong, *found.outside]
    if check is not None and not found.wrong:
        problems += check(bound)
    if problems:
        raise ConfigError(f"the configuration has values that cannot be used:{listed(problems)}")
    return bound


def known_keys(cls: type) -> list[str]:
    """Every dotted key of a dataclass of dataclasses, groups included."""
    out = []
    for name, hint in get_type_hints(cls).items():
        out.append(name)
        if dataclasses.is_dataclass(hint):
            out += [f"{name}.{sub}" for sub in known_keys(hint)]  # type: ignore[arg-type]
    return out


def open_keys(cls: type) -> list[str]:
    """The dotted keys whose values are dicts, so that any name may follow them."""
    out = []
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            out += [f"{name}.{sub}" for sub in open_keys(hint)]  # type: ignore[arg-type]
        elif any(get_origin(option) is dict for option in options_of(hint)):
            out.append(name)
    return out


class TextKey(NamedTuple):
    """A key whose value is a text.

    prose: one for people, in which no character has a meaning. may_be_list: or a list.
    is_list: a list of texts.
    """

    prose: bool
    may_be_list: bool
    is_list: bool


def text_keys(cls: type) -> dict[str, TextKey]:
    """The dotted keys whose values are texts, or may be one word for a group."""
    out: dict[str, TextKey] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, options = hints[field.name], options_of(hints[field.name])
        if dataclasses.is_dataclass(hint):
            out |= {f"{field.name}.{sub}": text for sub, text in text_keys(hint).items()}  # type: ignore[arg-type]
            if hasattr(hint, "key_of_word"):
                out[field.name] = TextKey(prose=False, may_be_list=False, is_list=False)
        elif str in options and not {int, float} & set(options):
            may_be_list = any(get_origin(option) is tuple for option in options)
            out[field.name] = TextKey(field.metadata.get("prose", False), may_be_list, is_list=False)
        elif tuple[str, ...] in options:
            out[field.name] = TextKey(prose=False, may_be_list=True, is_list=True)
    return out


def key_of_word(cls: type, name: str, word: str) -> str:
    """The key that `name=word` sets: `name` itself, or a key of the group `name` if one word may stand for the group."""
    of_group = getattr(get_type_hints(cls).get(name), "key_of_word", None)
    return name if of_group is None else f"{name}.{of_group(word)}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name that other systems call `name`, or else the one most like it, compared in full and by its last part."""
    known = list(names)
    meant = {candidate: candidate for candidate in known} | aliases(set(known))
    return key_elsewhere(name, set(known)) or meant[max(meant, key=lambda candidate: _likeness(name, candidate))]


def nearest_value(key: str, value: str, values: Iterable[str]) -> str:
    """The same for a value of `key`."""
    known = list(values)
    meant = value_elsewhere(key, value)
    return meant if meant in known else max(known, key=lambda candidate: _likeness(value, candidate))


def no_such_key(name: str, names: Iterable[str]) -> str:
    """What to say of a key that does not exist: which is meant, or that mpar has no such thing."""
    return not_there(name) or f"did you mean {nearest(name, names)}?"


def _likeness(name: str, candidate: str) -> float:
    last = difflib.SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return difflib.SequenceMatcher(None, name, candidate).ratio() + last


def _convert(hint: Any, value: Any, path: str, found: _Found) -> Any:
    """`value` converted to the type `hint`. What is wrong with it is added to `found`."""
    if dataclasses.is_dataclass(hint):
        return _convert_group(hint, value, path, found)  # type: ignore[arg-type]
    ok, result = converted(hint, value)
    if ok:
        return result
    words = [word for option in options_of(hint) if get_origin(option) is Literal for word in get_args(option)]
    near = f"; did you mean {nearest_value(path, value, words)}?" if words and isinstance(value, str) else ""
    found.wrong.append(f"{path}={_shown(value)}: must be {describe(hint)}{near}")
    return None


def _convert_group(cls: type, value: Any, path: str, found: _Found) -> Any:
    if isinstance(value, str) and hasattr(cls, "key_of_word"):
        value = {cls.key_of_word(value): value}
    if not isinstance(value, Mapping):
        found.wrong.append(f"{path}={_shown(value)}: must be a group of keys")
        return None
    hints = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    found.unknown += [f"{prefix}{key}" for key in value if key not in hints]
    given = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            entry = value[field.name]
            if entry == "???":
                found.wrong.append(f"{prefix}{field.name} is missing: {field.metadata.get('doc', 'it has no default')}")
                continue
            given[field.name] = _convert(hints[field.name], entry, f"{prefix}{field.name}", found)
            must_be = outside(field, given[field.name])
            found.outside += [f"{prefix}{field.name}={_shown(entry)}: must be {must_be}"] if must_be else []
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            found.wrong.append(f"{prefix}{field.name} is missing: {field.metadata.get('doc', 'it has no default')}")
    return None if found.unknown or found.wrong else cls(**given)


def listed(problems: Sequence[str]) -> str:
    """Problems below each other, as many as one screen has room for."""
    more = [f"and {len(problems) - _MOST_LINES} more"] * (len(problems) > _MOST_LINES)
    return "".join(f"\n  {line}" for line in [*problems[:_MOST_LINES], *more])


def _shown(value: object) -> str:
    """A value for a message, cut off if it is very long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
