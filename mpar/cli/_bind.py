"""Makes frozen dataclasses of a composed dict. One error lists every unknown key and every value of a wrong type."""

import dataclasses
import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mpar.errors import ConfigError, UnknownNameError

__all__ = ["bind", "describe", "known_keys", "nearest", "open_keys"]

T = TypeVar("T")


def bind(cls: type[T], values: Mapping[str, object]) -> T:
    """A `cls` made of `values`. Raises UnknownNameError if any key is unknown, ConfigError if only values are wrong; both errors
    list every problem.
    """
    unknown: list[str] = []
    wrong: list[str] = []
    names = known_keys(cls)
    bound = _convert(cls, values, "", unknown, wrong)
    if unknown:
        lines = [f"{name}: no such key; did you mean {nearest(name, names)}?" for name in unknown]
        raise UnknownNameError("the configuration has unknown keys:\n  " + "\n  ".join(lines + wrong))
    if wrong:
        raise ConfigError("the configuration has values that cannot be used:\n  " + "\n  ".join(wrong))
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
        elif any(get_origin(option) is dict for option in _options(hint)):
            out.append(name)
    return out


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name most like `name`, compared in full and by its last part. `name` is also compared with what other systems
    call a key.
    """
    known = {candidate: candidate for candidate in names}
    known |= {alias: ours for alias, ours in _ELSEWHERE.items() if ours in known}
    return known[max(known, key=lambda candidate: _likeness(name, candidate))]


_ELSEWHERE = {  # names in other systems: the key in mpar
    "batch_size": "data.batch_size",
    "context_parallel_size": "mesh.cp",
    "epochs": "steps",
    "expert_model_parallel_size": "strategy.expert_parallel",
    "gradient_accumulation_steps": "schedule.num_microbatches",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_norm",
    "max_length": "data.seq_len",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "output_dir": "run_dir",
    "pipeline_model_parallel_size": "mesh.pp",
    "save_steps": "checkpoint.every",
    "tensor_model_parallel_size": "mesh.tp",
    "zero_stage": "strategy.name",
}


def _likeness(name: str, candidate: str) -> float:
    last = difflib.SequenceMatcher(None, name.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
    return difflib.SequenceMatcher(None, name, candidate).ratio() + last


def _convert(hint: Any, value: Any, path: str, unknown: list[str], wrong: list[str]) -> Any:
    """`value` converted to the type `hint`. Unknown keys are added to `unknown`, values of a wrong type to `wrong`."""
    if dataclasses.is_dataclass(hint):
        return _convert_group(hint, value, path, unknown, wrong)  # type: ignore[arg-type]
    for option in _options(hint):
        ok, converted = _try(option, value)
        if ok:
            return converted
    words = [word for option in _options(hint) if get_origin(option) is Literal for word in get_args(option)]
    near = f"; did you mean {nearest(value, words)}?" if words and isinstance(value, str) else ""
    wrong.append(f"{path}={value!r}: must be {describe(hint)}{near}")
    return None


def _convert_group(cls: type, value: Any, path: str, unknown: list[str], wrong: list[str]) -> Any:
    if not isinstance(value, Mapping):
        wrong.append(f"{path}={value!r}: must be a group of keys")
        return None
    hints = get_type_hints(cls)
    prefix = f"{path}." if path else ""
    unknown += [f"{prefix}{key}" for key in value if key not in hints]
    given = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            entry = value[field.name]
            if entry == "???":
                wrong.append(f"{prefix}{field.name} is missing: {field.metadata.get('doc', 'it has no default')}")
                continue
            given[field.name] = _convert(hints[field.name], entry, f"{prefix}{field.name}", unknown, wrong)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            wrong.append(f"{prefix}{field.name} is missing: {field.metadata.get('doc', 'it has no default')}")
    return None if unknown or wrong else cls(**given)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _try(hint: Any, value: Any) -> tuple[bool, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True, value
    if hint in (type(None), None):
        return value is None, None
    if origin is Literal:
        return value in args, value
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool), float(value) if _is_number(value) else None
    if hint is int:
        is_whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, int) and not isinstance(value, bool)) or is_whole, int(value) if _is_number(value) else None
    if origin is tuple:
        return _try_tuple(args, value)
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        pairs = {key: _try(args[1], item) for key, item in value.items()}
        return all(ok for ok, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}
    return isinstance(value, hint), value


def _try_tuple(args: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, None
    hints = [args[0]] * len(value) if args[1:] == (Ellipsis,) else list(args)
    if len(hints) != len(value):
        return False, None
    items = [_try(hint, item) for hint, item in zip(hints, value, strict=True)]
    return all(ok for ok, _ in items), tuple(item for _, item in items)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")


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
    names = {type(None): "null", str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "a value"}
    return names.get(hint, str(hint))
