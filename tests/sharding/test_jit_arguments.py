"""Arguments of compiled functions by keyword, static values of Python, results that are None or numbers."""

import pytest
import torch

from mpar import Mesh, P, jit, testing
from mpar.errors import ConfigError, TraceError

MESH = Mesh(a=2)
X = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
ALONE = Mesh(a=1)


def scaled(x, *, weight=None, mode="twice", power=1):
    """What the tests compile."""
    y = x * 2 if mode == "twice" else x**power
    return y if weight is None else y * weight


def test_arguments_by_keyword_and_static_values():
    """Specs by name; static parameters have none."""
    fn = jit(scaled, mesh=MESH, in_specs={"x": P("a"), "weight": P(None, "a")}, static=("mode", "power"))
    lowered = fn.lower(X, weight=X.T, mode="power", power=3)
    testing.assert_close(lowered.simulate(X, weight=X.T, mode="power", power=3), X**3 * X.T)
    assert lowered.ranked.in_specs == (P("a"), P(None, "a"))


def test_the_order_of_keywords_does_not_matter():
    """A tuple of specs is in the order of the parameters."""
    fn = jit(lambda x, w: x - w, mesh=MESH, in_specs=(P("a"), P(None, "a")))
    testing.assert_close(fn.lower(w=X.T, x=X).simulate(w=X.T, x=X), X - X.T)


def test_each_static_value_is_compiled_once():
    """1, 1.0 and True are different values; calls run what was compiled for theirs."""
    seen = []

    def fn(x, n):
        seen.append(n)
        return x * n

    compiled = jit(fn, mesh=ALONE, static=("n",))
    for n in (1, 2, 1, 1.0, True, 2):
        testing.assert_close(compiled(X, n), X * n)
    assert seen == [1, 2, 1.0, True] and [type(n) for n in seen] == [int, int, float, bool]


def test_parameters_that_take_any_number_of_arguments():
    """`*args` and `**kwargs` of the function, one of them static."""
    fn = jit(lambda *xs, flag, **named: sum(xs) + named["y"] if flag else xs[0], mesh=MESH, static=("flag",))
    testing.assert_close(fn.lower(X, X.T, flag=True, y=X).simulate(X, X.T, flag=True, y=X), 2 * X + X.T)


RESULTS = {
    "None": (lambda x: None, None),
    "None inside": (lambda x: {"loss": x.sum(), "aux": (None, [])}, {"loss": X.sum(), "aux": (None, [])}),
    "numbers": (lambda x: (x.shape[0], 0.5, True), (4, 0.5, True)),
    "an argument": (lambda x: (x, x), (X, X)),
    "nothing": (lambda x: (), ()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_need_not_be_tensors(name):
    """None stays None, numbers become tensors; simulated and run."""
    fn, expected = RESULTS[name]
    for got in (jit(fn, mesh=MESH, in_specs=P("a")).lower(X).simulate(X), jit(fn, mesh=ALONE)(X)):
        compare(got, expected)


def compare(got, expected):
    """Equal, with numbers in the place of tensors of one element."""
    if isinstance(expected, (tuple, list, dict)):
        assert type(got) is type(expected) and len(got) == len(expected)
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            compare(got[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        testing.assert_close(got, expected)
    else:
        assert got == expected


def test_parameters_that_are_not_there_are_refused():
    """In `static` and in `in_specs`."""
    with pytest.raises(ConfigError, match=r"scaled has no parameters \['flag', 'y'\]; it has \['x', 'weight', 'mode', 'power'\]"):
        jit(scaled, mesh=MESH, in_specs={"y": P()}, static=("flag",))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jit(scaled, mesh=MESH, static=("mode",)).lower(X, X), "cannot call scaled.*too many positional arguments"),
        (
            lambda: jit(scaled, mesh=MESH, static=("mode",)).lower(X, mode=["twice"]),
            r"static parameters \['mode'\] are not hashable",
        ),
        (
            lambda: jit(scaled, mesh=MESH).lower(X, power=3),
            r"arguments \['1'\] are not tensors, or are sparse ones.\n.*`static=` of jit",
        ),
    ],
    ids=["signature", "unhashable", "not static"],
)
def test_wrong_arguments_are_refused(call, message):
    """With what does not fit."""
    with pytest.raises(TraceError, match=message):
        call()
