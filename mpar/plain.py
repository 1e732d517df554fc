"""Plain data: values of permitted classes as JSON text and back. Reading it never runs code and never imports by a name in it.

A dataclass is written as the list of its fields, in order. Where a hint names the base of several classes, such as an optimizer,
`[name of the class, fields]` is written, and only the classes that the caller gives may be named. A text begins with one line:
what it holds, a hash of the definitions of all classes in it, and a checksum of the rest. A text of other definitions is refused.

All values of one hint are converted together, field by field, because a program has thousands of values and instructions.
"""

import base64
import dataclasses
import gc
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any, ForwardRef, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from mpar.errors import MparError, PlainDataError
from mpar.mesh import Mesh
from mpar.plain_value import PlainValue
from mpar.spec import P

__all__ = ["PlainValue", "from_text", "to_text"]

T = TypeVar("T")


def to_text(cls: type[T], value: T, classes: Sequence[type] = ()) -> bytes:
    """`value`, a `cls`, as text that `from_text` reads. Nothing is written but what comes back equal and of the same type.

    classes: those that may stand where a hint names only their base or a protocol, such as optimizers and learning rates.
    Raises PlainDataError, which names the field, for whatever is no plain data.
    """
    codec = _Codec(classes)
    try:
        (plain,) = codec.form(cls).write([value])
        body = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except (_Wrong, ValueError, RecursionError) as error:
        raise PlainDataError(f"cannot write a {cls.__name__} as plain data: {error}") from None
    return f"mpar {cls.__name__} {codec.schema()} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def from_text(cls: type[T], text: bytes, classes: Sequence[type] = ()) -> T:
    """The `cls` that `to_text` wrote with the same `classes`.

    Raises PlainDataError if the text is damaged, holds something else, or was written with other definitions of the classes.
    """
    codec = _Codec(classes)
    form = codec.form(cls)
    head, _, body = text.partition(b"\n")
    expected = f"mpar {cls.__name__} {codec.schema()} {hashlib.sha256(body).hexdigest()}"
    if head != expected.encode():
        raise PlainDataError(f"cannot read a {cls.__name__} from {len(text)} bytes: {_difference(head, expected)}")
    collecting = gc.isenabled()
    gc.disable()  # what is read has no cycles, and the collector would go through all of it several times
    try:
        (value,) = form.read([json.loads(body)])
    except (_Wrong, ValueError, RecursionError) as error:
        raise PlainDataError(f"cannot read a {cls.__name__}: {error}") from None
    finally:
        if collecting:
            gc.enable()
    return value


def _difference(head: bytes, expected: str) -> str:
    words, wanted = head.decode("ascii", "replace").split(" "), expected.split(" ")
    if len(words) != 4 or words[0] != "mpar":
        return "it does not begin like plain data of mpar"
    if words[1] != wanted[1]:
        return f"it holds a {words[1][:40]!r}"
    if words[2] != wanted[2]:
        return "another version of mpar wrote it, or it was written for other classes"
    return "its checksum does not fit, so it is damaged"


class _Wrong(Exception):
    """A value that cannot be written or read."""


_Values: TypeAlias = list[Any]


@dataclasses.dataclass(frozen=True)
class _Form:
    """How all values of one hint are written and read, and which values and plain values look like ones of this hint.

    kinds: the classes that plain values of this form have. same: whether a value is its own plain value. label: what values must
    be, for messages, if the hint does not say it.
    """

    write: Callable[[_Values], _Values]
    read: Callable[[_Values], _Values]
    fits: Callable[[Any], bool]
    fits_plain: Callable[[Any], bool]
    kinds: frozenset[type] = frozenset({list})
    same: bool = False
    label: str = ""


class _Codec:
    """Makes the forms of hints. `classes` are those that may stand for a base that a hint names."""

    def __init__(self, classes: Sequence[type]) -> None:
        self.classes = {cls.__name__: cls for cls in classes}
        if len(self.classes) < len(classes):
            raise PlainDataError(f"two of the classes {[cls.__qualname__ for cls in classes]} have the same name")
        self._forms: dict[Any, _Form] = {}
        self._definitions: list[str] = []

    def schema(self) -> str:
        """A hash of the definitions of all classes of which a form was made."""
        return hashlib.sha256("\n".join(sorted(self._definitions)).encode()).hexdigest()[:16]

    def form(self, hint: Any) -> _Form:
        """The form of a hint. Raises PlainDataError if values of the hint cannot be plain data."""
        if hint not in self._forms:
            self._forms[hint] = self._inside_itself(hint)
            try:
                self._forms[hint] = self._make(hint)
            except PlainDataError:
                del self._forms[hint]
                raise
        return self._forms[hint]

    def _inside_itself(self, hint: Any) -> _Form:
        """The form of a hint while that is being made: a class may have a part of its own base."""
        return _Form(
            lambda values: self._forms[hint].write(values) if values else [],
            lambda values: self._forms[hint].read(values) if values else [],
            lambda x: self._forms[hint].fits(x),
            lambda x: self._forms[hint].fits_plain(x),
        )

    def _make(self, hint: Any) -> _Form:
        origin, args = get_origin(hint), get_args(hint)
        if hint in _LEAVES:
            return _LEAVES[hint]
        if hint is Any or isinstance(hint, (str, ForwardRef)):
            return _ANY
        if origin is Literal:
            return _literal(args)
        if origin in (Union, types.UnionType):
            return _union([self.form(option) for option in args], str(hint))
        if origin is tuple and args[1:] != (Ellipsis,):
            return _row("tuple", tuple, [f"[{i}]" for i in range(len(args))], [self.form(arg) for arg in args], _tuples)
        if origin in (tuple, list):
            return _items(self.form(args[0]), origin)
        if origin in (dict, Mapping):
            return _object(self.form(args[1])) if args[0] is str else _mapping(self.form(args[0]), self.form(args[1]))
        if isinstance(hint, type):
            return self._class(hint)
        raise PlainDataError(f"{hint!r} is no hint of plain data")

    def _class(self, cls: type) -> _Form:
        """The form of a class; if classes were given that may stand for it, each of them after its name."""
        protocol = getattr(cls, "_is_protocol", False)
        named = {name: own for name, own in self.classes.items() if protocol or cls in own.__mro__}
        if protocol or set(named.values()) - {cls}:
            return _named(cls, named, {name: self._fields(own) for name, own in named.items()})
        return self._fields(cls)

    def _fields(self, cls: type) -> _Form:
        """The form of a dataclass or of a NamedTuple: the list of its fields."""
        hints, make = get_type_hints(cls, localns={"PlainValue": Any}), cls
        if dataclasses.is_dataclass(cls):
            fields = dataclasses.fields(cls)
            names = [field.name for field in fields]
            if not all(field.init for field in fields):
                raise PlainDataError(f"{cls.__qualname__} has fields that it is not made from, so it is no plain data")
            if any(field.kw_only for field in fields):
                make = lambda *parts: cls(**dict(zip(names, parts, strict=True)))  # type: ignore[assignment]  # noqa: E731
        elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
            names = list(cls._fields)
        else:
            raise PlainDataError(f"{cls.__qualname__} is not a dataclass, so it is no plain data")
        self._definitions.append(f"{cls.__qualname__}({', '.join(f'{name}: {hints[name]}' for name in names)})")
        forms = [self.form(hints[name]) for name in names]
        return _row(cls.__qualname__, cls, [f".{name}" for name in names], forms, lambda columns: list(map(make, *columns)))


def _need(good: Callable[[Any], bool], values: Iterable[Any], kind: str) -> None:
    """Raise _Wrong, which shows the first value that is not good."""
    for value in values:
        if not good(value):
            text = repr(value)
            raise _Wrong(f"{text[:80] + '...' * (len(text) > 80)} is not {kind}")


def _exactly(*kinds: type) -> _Form:
    """Values of these classes, which JSON has too."""
    wanted, kind = set(kinds), f"of the type {kinds[0].__name__}"

    def same(values: _Values) -> _Values:
        if not wanted.issuperset(map(type, values)):
            _need(lambda x: type(x) in wanted, values, kind)
        return values

    return _Form(same, same, lambda x: type(x) in wanted, lambda x: type(x) in wanted, frozenset(kinds), same=True)


def _literal(words: tuple[Any, ...]) -> _Form:
    known = {(type(word), word) for word in words}

    def good(x: Any) -> bool:
        return isinstance(x, (str, int, bool)) and (type(x), x) in known

    def same(values: _Values) -> _Values:
        _need(good, values, f"one of {words}")
        return values

    return _Form(same, same, good, good, frozenset(map(type, words)), same=True)


def _union(options: list[_Form], label: str) -> _Form:
    """Each value in the form of the first option that it looks like. Raises PlainDataError if reading could confuse two."""
    for one, other in combinations(options, 2):
        if one.kinds & other.kinds and not (one.same and other.same):
            raise PlainDataError(f"values of {label} cannot be told apart as plain data")

    label = next((option.label for option in options if option.label), label)

    def each(values: _Values, fits: list[Callable[[Any], bool]], converts: list[Callable[[_Values], _Values]]) -> _Values:
        _need(lambda x: any(fit(x) for fit in fits), values, label)
        chosen = [next(i for i, fit in enumerate(fits) if fit(value)) for value in values]
        parts = [iter(convert([v for v, c in zip(values, chosen, strict=True) if c == i])) for i, convert in enumerate(converts)]
        return [next(parts[i]) for i in chosen]

    fits, plain = [option.fits for option in options], [option.fits_plain for option in options]
    writes, reads = [option.write for option in options], [option.read for option in options]
    return _Form(
        lambda values: each(values, fits, writes),
        lambda values: each(values, plain, reads),
        lambda x: any(fit(x) for fit in fits),
        lambda x: any(fit(x) for fit in plain),
        frozenset().union(*(option.kinds for option in options)),
        all(option.same for option in options),
    )


def _items(item: _Form, cls: type) -> _Form:
    """Tuples or lists of any length."""

    def write(values: _Values) -> _Values:
        _need(lambda x: isinstance(x, cls), values, f"a {cls.__name__}")
        return _split(item.write(list(chain.from_iterable(values))), values, list)

    def read(values: _Values) -> _Values:
        _need(_is_list, values, f"the list of a {cls.__name__}")
        return _split(item.read(list(chain.from_iterable(values))), values, cls)

    return _Form(write, read, lambda x: isinstance(x, cls), _is_list)


def _split(items: _Values, lengths: _Values, make: type) -> _Values:
    """`items` in parts as long as those of `lengths`."""
    rest = iter(items)
    return [make(islice(rest, len(part))) for part in lengths]


def _row(label: str, cls: type, names: list[str], forms: list[_Form], make: Callable[[_Values], _Values]) -> _Form:
    """Objects with a fixed number of parts, each of its own hint; `make` gets a column of values for each part."""
    size = len(names)

    def fits(x: Any) -> bool:
        return isinstance(x, tuple) and len(x) == size if cls is tuple else type(x) is cls

    def fits_plain(x: Any) -> bool:
        return type(x) is list and len(x) == size

    def convert(converts: list[Callable[[_Values], _Values]], columns: list[_Values]) -> list[_Values]:
        out: list[_Values] = []
        try:
            for convert_column, column in zip(converts, columns, strict=True):
                out.append(convert_column(column))
        except _Wrong as wrong:
            raise _Wrong(f"{label}{names[len(out)]}: {wrong}") from None
        return out

    def write(values: _Values) -> _Values:
        _need(fits, values, f"of the type {label}")
        if issubclass(cls, tuple):
            columns = [[value[i] for value in values] for i in range(size)]
        else:
            columns = [[getattr(value, name[1:]) for value in values] for name in names]
        return [list(row) for row in zip(*convert([form.write for form in forms], columns), strict=True)] or [[] for _ in values]

    def read(values: _Values) -> _Values:
        _need(fits_plain, values, f"the {size} parts of {label}")
        columns = convert([form.read for form in forms], [list(column) for column in zip(*values, strict=True)] or [[]] * size)
        try:
            return make(columns) if size else [cls() for _ in values]
        except (MparError, TypeError, ValueError) as error:
            raise _Wrong(f"{label}: {error}") from None

    return _Form(write, read, fits, fits_plain)


def _tuples(columns: list[_Values]) -> _Values:
    return list(zip(*columns, strict=True))


def _object(item: _Form) -> _Form:
    """Dicts with text as keys."""

    def convert(values: _Values, items: Callable[[_Values], _Values]) -> _Values:
        _need(_has_text_keys, values, "a dict with text as keys")
        converted = iter(items([entry for value in values for entry in value.values()]))
        return [{name: next(converted) for name in value} for value in values]

    return _Form(
        lambda values: convert(values, item.write),
        lambda values: convert(values, item.read),
        _is_dict,
        _is_dict,
        frozenset({dict}),
    )


def _mapping(key: _Form, item: _Form) -> _Form:
    """Dicts with other keys, as a list of their keys and one of their values, in order."""

    def fits_plain(x: Any) -> bool:
        return type(x) is list and len(x) == 2 and _is_list(x[0]) and _is_list(x[1]) and len(x[0]) == len(x[1])

    def convert(keys: _Values, items: _Values, key: Callable[[_Values], _Values], item: Callable[[_Values], _Values]) -> _Values:
        new_keys = _split(key(list(chain.from_iterable(keys))), keys, list)
        return list(zip(new_keys, _split(item(list(chain.from_iterable(items))), items, list), strict=True))

    def write(values: _Values) -> _Values:
        _need(_is_dict, values, "a dict")
        return [list(x) for x in convert([list(x) for x in values], [list(x.values()) for x in values], key.write, item.write)]

    def read(values: _Values) -> _Values:
        _need(fits_plain, values, "the keys and values of a dict")
        pairs = convert([x[0] for x in values], [x[1] for x in values], key.read, item.read)
        return [dict(zip(keys, items, strict=True)) for keys, items in pairs]

    return _Form(write, read, _is_dict, fits_plain)


def _named(base: type, classes: Mapping[str, type], forms: Mapping[str, _Form]) -> _Form:
    """Objects of one of several classes, each after the name of its class."""
    by_class = {cls: name for name, cls in classes.items()}
    known = f"of a class that was given for {base.__name__}: {', '.join(classes) or 'none was'}"

    def fits_plain(x: Any) -> bool:
        return type(x) is list and len(x) == 2 and type(x[0]) is str and x[0] in forms

    def write(values: _Values) -> _Values:
        _need(lambda x: type(x) in by_class, values, known)
        return [[by_class[type(x)], forms[by_class[type(x)]].write([x])[0]] for x in values]

    def read(values: _Values) -> _Values:
        _need(fits_plain, values, known)
        return [forms[name].read([fields])[0] for name, fields in values]

    return _Form(write, read, lambda x: type(x) in by_class, fits_plain, label=known)


def _is_list(x: Any) -> bool:
    return type(x) is list


def _is_dict(x: Any) -> bool:
    return type(x) is dict


def _has_text_keys(x: Any) -> bool:
    return type(x) is dict and all(type(key) is str for key in x)


def _is_tree(x: Any) -> bool:
    """Whether `x` is what JSON has: lists, dicts with text as keys, text, numbers, booleans, None."""
    if type(x) is list:
        return all(map(_is_tree, x))
    if type(x) is dict:
        return _has_text_keys(x) and all(map(_is_tree, x.values()))
    return x is None or type(x) in (bool, int, float, str)


def _trees(values: _Values) -> _Values:
    _need(_is_tree, values, "of lists, dicts, text and numbers alone")
    return values


def _leaf(cls: type, write: Callable[[Any], Any], read: Callable[[Any], Any], *, plain: type = str) -> _Form:
    """Objects of exactly one class, each as a plain value; equal texts are read once, so that equal values are one object."""

    def write_all(values: _Values) -> _Values:
        _need(lambda x: type(x) is cls, values, f"of the type {cls.__name__}")
        return [write(x) for x in values]

    def read_all(values: _Values) -> _Values:
        _need(lambda x: type(x) is plain, values, f"written as a {cls.__name__} is")
        if plain is not str:
            return [read(x) for x in values]
        known = {text: read(text) for text in set(values)}
        return [known[text] for text in values]

    return _Form(write_all, read_all, lambda x: type(x) is cls, lambda x: type(x) is plain, frozenset({plain}))


_AXES = re.compile(r"(-|\w+(,\w+)*)( (-|\w+(,\w+)*))*( \+\w+(,\w+)*)?|\+\w+(,\w+)*|")
"""A spec as text: the axes of each dim, `-` for none, and after a `+` those of the pending sum."""


def _is_spec(text: str) -> bool:
    return _AXES.fullmatch(text) is not None


def _write_spec(spec: P) -> str:
    dims = [",".join(dim) or "-" for dim in spec.dims]
    text = " ".join([*dims, *(["+" + ",".join(spec.partial)] if spec.partial else [])])
    _need(_is_spec, [text], "a spec of axes whose names are words")
    return text


def _read_spec(text: str) -> P:
    _need(_is_spec, [text], "a spec")
    words = text.split()
    partial = tuple(words.pop()[1:].split(",")) if words and words[-1][0] == "+" else ()
    return P(*(None if word == "-" else tuple(word.split(",")) for word in words), partial=partial)


def _read_mesh(sizes: list) -> Mesh:
    _need(lambda pair: _is_list(pair) and list(map(type, pair)) == [str, int], sizes, "a mesh axis with its size")
    return Mesh(**dict(sizes))


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _read_dtype(name: str) -> torch.dtype:
    _need(_DTYPES.__contains__, [name], "the name of a dtype")
    return _DTYPES[name]


def _write_tensor(x: Tensor) -> list:
    """The dtype, the shape and the bytes of a tensor on the CPU."""
    _need(lambda x: x.device.type == "cpu" and x.layout is torch.strided, [x], "a dense tensor on the CPU")
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return [_DTYPE.write([x.dtype])[0], list(x.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _read_tensor(plain: list) -> Tensor:
    _need(lambda x: len(x) == 3 and _is_list(x[1]) and type(x[2]) is str, [plain], "the dtype, shape and bytes of a tensor")
    data = bytearray(base64.b64decode(plain[2], validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        return flat.view(_DTYPE.read([plain[0]])[0]).reshape(plain[1])
    except (RuntimeError, TypeError) as error:
        raise _Wrong(f"{len(data)} bytes are no tensor {plain[0]} {plain[1]}: {error}") from None


_ANY = _Form(_trees, _trees, _is_tree, _is_tree, frozenset({bool, int, float, str, list, dict, type(None)}), same=True)
_DTYPE = _leaf(torch.dtype, lambda x: str(x).removeprefix("torch."), _read_dtype)
_LEAVES: dict[Any, _Form] = {
    bool: _exactly(bool),
    int: _exactly(int),
    float: _exactly(float, int),
    str: _exactly(str),
    type(None): _exactly(type(None)),
    P: _leaf(P, _write_spec, _read_spec),
    Mesh: _leaf(Mesh, lambda mesh: [list(pair) for pair in mesh.sizes.items()], _read_mesh, plain=list),
    torch.dtype: _DTYPE,
    Tensor: _leaf(Tensor, _write_tensor, _read_tensor, plain=list),
    Path: _leaf(type(Path()), str, Path),
}
