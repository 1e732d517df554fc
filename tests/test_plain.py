"""Plain data comes back equal and of the same type, or is refused with a message; no text makes reading do anything else."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpar import plain
from mpar.errors import ConfigError, PlainDataError
from mpar.mesh import Mesh
from mpar.spec import P


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Rate:
    peak: float

    def __post_init__(self) -> None:
        if self.peak < 0:
            raise ConfigError(f"a rate of {self.peak}")


@dataclass(frozen=True, kw_only=True)
class Falling(Rate):
    steps: int
    kind: ClassVar[str] = "falling"


@dataclass
class Everything:
    name: str
    count: int
    share: float
    on: bool
    word: Literal["a", 1]
    maybe: int | None
    many: tuple[Point, ...]
    pair: tuple[str, int]
    rows: list[list[int]]
    table: Mapping[str, tuple[int, int]]
    numbered: dict[int, Point]
    spec: P
    mesh: Mesh
    dtype: torch.dtype
    path: Path | None
    rate: Rate | float
    free: dict[str, Any]
    mixed: str | tuple[int, ...] | None = None
    deep: list["Rate"] = field(default_factory=list)


VALUE = Everything(
    name="naïve \u2028 \0 🐈",
    count=-(2**70),
    share=0.1 + 0.2,
    on=True,
    word="a",
    maybe=None,
    many=(Point(1, 2.0), Point(3, float("inf"))),
    pair=("x", 1),
    rows=[[], [1, 2], [3]],
    table={"b": (1, 2), "a": (3, 4)},
    numbered={3: Point(0, 0.0), 1: Point(1, 1)},
    spec=P("fsdp", None, ("cp", "tp"), partial="dp"),
    mesh=Mesh(pp=2, tp=4),
    dtype=torch.float8_e4m3fn,
    path=Path("a/b"),
    rate=Falling(peak=1e-3, steps=7),
    free={"a": [1, {"b": None}], "c": -0.0},
    mixed=(4, 5),
    deep=[Rate(1.0), Rate(2)],
)
CLASSES = (Rate, Falling)


def test_everything_comes_back():
    """Every kind of value is equal after a round trip, has the same type, and is written the same again."""
    text = plain.to_text(Everything, VALUE, CLASSES)
    again = plain.from_text(Everything, text, CLASSES)
    assert again == VALUE
    assert repr(again) == repr(VALUE)  # types, signs of zeros, order of dicts
    assert plain.to_text(Everything, again, CLASSES) == text


@dataclass(frozen=True)
class Held:
    tensors: dict[str, Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)], ids=str)
def test_tensors_come_back_bit_by_bit(dtype, shape):
    """Dtype, shape and bytes of a tensor survive, for NaNs too, and for one that is not contiguous."""
    x = (torch.randn(shape) * 3).to(dtype)
    tensors = {"x": x, "t": x.mT if x.ndim == 2 else x, "nan": torch.tensor([float("nan"), -0.0])}
    again = plain.from_text(Held, plain.to_text(Held, Held(tensors))).tensors
    for name, tensor in tensors.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert again[name].reshape(-1).view(torch.uint8).tolist() == tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


axis_names = st.lists(st.sampled_from(["dp", "fsdp", "cp_outer", "cp_inner", "tp", "pp"]), unique=True, max_size=6)


@st.composite
def specs(draw: st.DrawFn) -> P:
    """A spec of up to four dims, each axis used once."""
    groups: list[list[str]] = [[] for _ in range(5)]
    for axis in draw(axis_names):
        groups[draw(st.integers(0, 4))].append(axis)
    return P(*map(tuple, groups[:4]), partial=tuple(groups[4]))


@dataclass(frozen=True)
class Placed:
    specs: list[P]


@given(st.lists(specs(), max_size=4))
def test_specs_come_back(given_specs):
    """Every spec is read as it was."""
    assert plain.from_text(Placed, plain.to_text(Placed, Placed(given_specs))).specs == given_specs


@dataclass(frozen=True)
class Free:
    value: dict[str, Any]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=3))
def test_free_values_come_back(value):
    """What JSON has comes back with its types."""
    assert repr(plain.from_text(Free, plain.to_text(Free, Free(value))).value) == repr(value)


@dataclass(frozen=True)
class Scaled(Rate):
    """A class with a part of its own base."""

    base: Rate


def test_a_class_may_have_a_part_of_its_own_base():
    """However deep."""
    value = Scaled(2.0, Scaled(3.0, Rate(1.0)))
    assert plain.from_text(Rate, plain.to_text(Rate, value, [Rate, Scaled]), [Rate, Scaled]) == value


class Own(Rate):
    """A class that nobody gave."""


WRONG = {
    "a subclass": ("deep", [Own(1.0)]),
    "a number for a name": ("name", 3),
    "a truth value for a number": ("count", True),
    "a list for a tuple": ("many", [Point(1, 1.0)]),
    "a tuple in free data": ("free", {"a": (1, 2)}),
    "a number as a key": ("free", {1: 2}),
    "an object": ("free", {"a": object()}),
    "another word": ("word", "b"),
    "another length": ("pair", ("x", 1, 2)),
    "half a character": ("name", "\ud800"),
}


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", WRONG)
def test_what_would_come_back_otherwise_is_not_written(name):
    """A value of another type than the hint is refused."""
    key, value = WRONG[name]
    with pytest.raises(PlainDataError):
        plain.to_text(Everything, Everything(**{**vars(VALUE), key: value}), CLASSES)


def test_the_field_is_named():
    """The message says in which field of which class the wrong value is."""
    with pytest.raises(PlainDataError, match=r"Everything\.many: Point\.x: 'one' is not of the type int"):
        plain.to_text(Everything, Everything(**{**vars(VALUE), "many": (Point("one", 1.0),)}), CLASSES)


def test_hints_that_cannot_be_told_apart_are_refused():
    """A list of numbers could be either of two options."""

    @dataclass
    class Two:
        value: tuple[int, ...] | list[int]

    with pytest.raises(PlainDataError, match="told apart"):
        plain.to_text(Two, Two((1,)))


def signed(cls: type, body: str, like: bytes) -> bytes:
    """`body` with the first line of `like` and a checksum that fits: what somebody would write on purpose."""
    name, schema = like.split(b" ")[1:3]
    return b"mpar %s %s %s\n" % (name, schema, hashlib.sha256(body.encode()).hexdigest().encode()) + body.encode()


BODIES = {
    "deep": "[" * 100_000,
    "no JSON": "__import__('os')",
    "another length": "[1]",
    "another class": '["Popen",[1]]',
    "a number": "7",
    "null": "null",
    "a class refuses": '["Rate",[-1.0]]',
    "a long number": "9" * 10_000,
    "half a character": '["\\ud800",[1.0]]',
}


@dataclass(frozen=True)
class Rated:
    rate: Rate


@pytest.mark.cases(9)
@pytest.mark.parametrize("body", BODIES)
def test_texts_made_on_purpose_are_refused(body):
    """A wrong text with the right checksum gives our error."""
    like = plain.to_text(Rated, Rated(Falling(peak=1.0, steps=2)), CLASSES)
    with pytest.raises(PlainDataError):
        plain.from_text(Rated, signed(Rated, BODIES[body], like), CLASSES)
    wrapped = f"[{BODIES[body]}]"
    with pytest.raises(PlainDataError):
        plain.from_text(Rated, signed(Rated, wrapped, like), CLASSES)


def test_each_flipped_bit_is_noticed():
    """Each byte of a text is changed in turn, and each beginning of it is read."""
    text = plain.to_text(Rated, Rated(Falling(peak=1.0, steps=2)), CLASSES)
    for i in range(len(text)):
        damaged = bytearray(text)
        damaged[i] ^= 1 << (i % 8)
        for wrong in (bytes(damaged), text[:i]):
            with pytest.raises(PlainDataError):
                plain.from_text(Rated, wrong, CLASSES)


def test_other_definitions_are_refused():
    """A text of a class that has got another field is of another version, and that is what the message says."""

    def rated(hint: type) -> type:
        return dataclass(type("Rated", (), {"__annotations__": {"rate": hint}, "__qualname__": "Rated", "__module__": __name__}))

    before = rated(int)
    text = plain.to_text(before, before(3))
    assert plain.from_text(before, text).rate == 3
    with pytest.raises(PlainDataError, match="another version"):
        plain.from_text(rated(float), text)
    with pytest.raises(PlainDataError, match="it holds a 'Rated'"):
        plain.from_text(Free, text)


def test_only_classes_that_were_given_are_made():
    """Without its class, a learning rate is neither written nor read."""
    value = Rated(Falling(peak=1.0, steps=2))
    with pytest.raises(PlainDataError):
        plain.to_text(Rated, value)
    with pytest.raises(PlainDataError):
        plain.from_text(Rated, plain.to_text(Rated, value, CLASSES), (Rate,))
    assert json.loads(plain.to_text(Rated, value, CLASSES).partition(b"\n")[2]) == [["Falling", [1.0, 2]]]
