"""Values of a command line converted to the types that fields and parameters are annotated with, and these types in words."""

import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["converted", "describe", "options_of"]

_LARGEST = sys.float_info.max
_NAMES = {
    type(None): "null",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Any: "a value",
}


def options_of(hint: object) -> tuple[object, ...]:
    """The types of a union, or the one type that `hint` is."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def converted(hint: object, value: object) -> tuple[bool, object]:
    """Whether `value` is of the type `hint`, and the value in that type: tuples for lists, floats for whole numbers."""
    for option in options_of(hint):
        ok, result = _try(option, value)
        if ok:
            return True, result
    return False, None


def _try(hint: Any, value: Any) -> tuple[bool, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True, value
    if hint in (type(None), None):
        return value is None, None
    if origin is Literal:
        return value in args, value
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), float(value) if _is_number(value) else math.nan
    if hint is int:
        is_whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, int) and not isinstance(value, bool)) or is_whole, int(value) if _is_number(value) else None
    if origin is tuple:
        return _try_tuple(args, value)
    if origin in (list, Sequence):
        ok, items = _try_tuple((*args, Ellipsis), value)
        return ok, None if items is None else list(items)
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        pairs = {key: converted(args[1], item) for key, item in value.items()}
        return all(ok for ok, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}
    return (isinstance(value, hint) if isinstance(hint, type) and origin is None else True), value


def _try_tuple(args: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    hints = [args[0]] * len(value) if args[1:] == (Ellipsis,) else list(args)
    if len(hints) != len(value):
        return False, None
    items = [converted(hint, item) for hint, item in zip(hints, value, strict=True)]
    return all(ok for ok, _ in items), tuple(item for _, item in items)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -_LARGEST <= value <= _LARGEST


def describe(hint: object) -> str:
    """The type `hint` in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is tuple:
        inner = f"{describe(args[0])}, ..." if args[1:] == (Ellipsis,) else ", ".join(describe(arg) for arg in args)
        return f"[{inner}]"
    if origin is dict:
        return f"{{key: {describe(args[1])}}}"
    return _NAMES.get(hint, str(hint))
