"""Binding plain data to dataclasses."""

from dataclasses import dataclass
from typing import Literal

import pytest

from mpar.cli._bind import bind, known_keys, nearest
from mpar.errors import ConfigError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    steps: int
    sources: tuple[str, ...] = ()
    pair: str | tuple[str, str] | None = None
    rates: dict[str, float] | None = None
    on: bool = True


GOOD = {"inner": {"lr": 1}, "steps": 3}


def test_values_take_their_types():
    """Lists become tuples, whole numbers become floats where a float is asked for."""
    bound = bind(Outer, {**GOOD, "sources": ["x"], "pair": ["a", "b"], "rates": {"k": 2}})
    assert bound == Outer(inner=Inner(lr=1.0), steps=3, sources=("x",), pair=("a", "b"), rates={"k": 2.0})
    assert isinstance(bound.inner.lr, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": "three"}, "steps='three': must be a whole number"),
        ({"steps": True}, "steps=True: must be a whole number"),
        ({"steps": 2.5}, "steps=2.5: must be a whole number"),
        ({"on": 1}, "on=1: must be true or false"),
        ({"sources": "x"}, "sources='x': must be [text, ...]"),
        ({"pair": ["a"]}, "pair=['a']: must be text or [text, text] or null"),
        ({"inner": {"lr": 1, "kind": "c"}}, "inner.kind='c': must be a or b"),
        ({"inner": 3}, "inner=3: must be a group of keys"),
        ({"inner": {}}, "inner.lr is missing"),
        ({"steps": "???"}, "steps is missing"),
        ({"steps": None}, "steps=None: must be a whole number"),
    ],
)
def test_a_wrong_value_is_refused(change, words):
    """A value of another type is named with what it must be."""
    with pytest.raises(ConfigError, match=r"cannot be used") as caught:
        bind(Outer, {**GOOD, **change})
    assert words in str(caught.value)


def test_all_offenders_are_listed():
    """Unknown keys and wrong values come in one error."""
    with pytest.raises(UnknownNameError) as caught:
        bind(Outer, {"inner": {"lr": "x", "knid": "a"}, "stesp": 3, "steps": 1})
    text = str(caught.value)
    assert "inner.knid: no such key; did you mean inner.kind?" in text
    assert "stesp: no such key; did you mean steps?" in text
    assert "inner.lr='x'" in text


def test_known_keys_are_dotted():
    """Groups and what is in them."""
    assert known_keys(Outer)[:3] == ["inner", "inner.lr", "inner.kind"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rat", "optimizer.lr"),
        ("optimizer.weihgt_decay", "optimizer.weight_decay"),
        ("sedd", "seed"),
        ("batch_siz", "data.batch_size"),
    ],
)
def test_nearest(typed, meant):
    """A misspelt key finds its name, in another group or another system's words too."""
    assert (
        nearest(typed, ["seed", "steps", "optimizer.lr", "optimizer.weight_decay", "optimizer.eps", "data.batch_size"]) == meant
    )
