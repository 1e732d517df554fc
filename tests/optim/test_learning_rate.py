import itertools
import math
import pickle

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.errors import ConfigError
from mpar.optim import WSD, Constant, Cosine, Linear, learning_rate


@st.composite
def rates(draw):
    """A decaying learning rate of any kind, with warm-up and minimum given in steps or as ratios."""
    total = draw(st.integers(2, 300))
    options = {"lr": draw(st.floats(1e-6, 1.0)), "total_steps": total}
    warmup = draw(st.integers(0, total - 1))
    options |= draw(st.sampled_from([{"warmup_steps": warmup}, {"warmup_ratio": warmup / total}]))
    low = draw(st.floats(0, 1))
    options |= draw(st.sampled_from([{}, {"min_ratio": low}, {"min_lr": low * options["lr"]}]))
    kind = draw(st.sampled_from([Linear, Cosine, WSD]))
    if kind is WSD:
        decay = draw(st.integers(1, total - warmup))
        options |= draw(st.sampled_from([{"decay_steps": decay}, {"decay_ratio": decay / total}]))
        options["shape"] = draw(st.sampled_from(["linear", "cosine", "1-sqrt"]))
    return kind(**options)


@settings(deadline=None)
@given(rates())
def test_endpoints(rate):
    """Update 1 has lr / w, update w has lr, the last update and all after it have exactly the minimum."""
    warmup, total = rate.num_warmup_steps, rate.total_steps
    if warmup:
        assert math.isclose(rate(1), rate.lr / warmup, rel_tol=1e-12)
        assert math.isclose(rate(warmup), rate.lr, rel_tol=1e-12)
    assert [rate(total), rate(total + 1), rate(10 * total)] == [rate.minimum] * 3


@settings(deadline=None)
@given(rates())
def test_bounded_and_monotone(rate):
    """Rates rise strictly to the peak, never rise after it, and after warm-up lie between the minimum and the peak."""
    warmup, total = rate.num_warmup_steps, rate.total_steps
    rates = [rate(step) for step in range(1, total + 3)]
    rising, falling = rates[:warmup], rates[max(warmup - 1, 0) :]
    assert all(0 < a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert all(rate.minimum <= value <= rate.lr for value in falling)


@settings(deadline=None)
@given(rates())
def test_values_that_travel(rate):
    """Learning rates hash, compare, pickle, and print as the code that makes them."""
    again = pickle.loads(pickle.dumps(rate))
    assert again == rate and hash(again) == hash(rate)
    assert eval(repr(rate), {kind.__name__: kind for kind in (Linear, Cosine, WSD)}) == rate


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (Constant(lr=2.0), {1: 2.0, 2: 2.0, 10**9: 2.0}),
        (Constant(lr=2.0, warmup_steps=4), {1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.0}),
        (Constant(lr=2.0, warmup_ratio=0.1, total_steps=40), {1: 0.5, 4: 2.0, 5: 2.0, 50: 2.0}),
        (Linear(lr=1.0, total_steps=10), {1: 0.9, 5: 0.5, 9: 0.1, 10: 0.0, 11: 0.0}),
        (Linear(lr=1.0, total_steps=12, warmup_steps=2, min_lr=0.5), {1: 0.5, 2: 1.0, 7: 0.75, 12: 0.5, 13: 0.5}),
        (Cosine(lr=1.0, total_steps=12, warmup_steps=3, min_ratio=0.2), {3: 1.0, 6: 0.8, 9: 0.4, 12: 0.2}),
        (WSD(lr=1.0, total_steps=20, warmup_steps=2, decay_steps=4), {2: 1.0, 16: 1.0, 17: 0.75, 18: 0.5, 20: 0.0}),
        (WSD(lr=1.0, total_steps=20, decay_steps=4, shape="1-sqrt", min_lr=0.2), {16: 1.0, 17: 0.6, 20: 0.2}),
        (WSD(lr=1.0, total_steps=20, decay_ratio=0.3, shape="cosine"), {14: 1.0, 16: 0.75, 17: 0.5, 18: 0.25}),
        (Constant(lr=7.0, warmup_ratio=0.07, total_steps=100), {1: 1.0, 7: 7.0}),  # 0.07 * 100 > 7
        (WSD(lr=1.0, total_steps=30), {27: 1.0, 28: 2 / 3, 29: 1 / 3, 30: 0.0}),
    ],
    ids=lambda value: repr(value) if not isinstance(value, dict) else "",
)
def test_closed_forms(rate, expected):
    """Rates worked out by hand."""
    assert {step: pytest.approx(rate(step), rel=1e-12, abs=1e-15) for step in expected} == expected


def test_rounding_never_passes_the_peak():
    """min + (lr - min) rounds to more than lr for these numbers; the stable phase has exactly lr."""
    lr, low = 0.9898564920516603, 0.15837703872826564
    assert low + (lr - low) > lr
    assert WSD(lr=lr, min_lr=low, total_steps=20, warmup_steps=2)(10) == lr


def of_transformers(make, num_steps):
    """The rates that a transformers scheduler has after 0, 1, ... num_steps of its own steps, for a peak of 3."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=3.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(num_steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def cosine_with_min(optimizer):
    return transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 23, min_lr_rate=0.1)


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (Constant(lr=3.0, warmup_steps=5), lambda o: transformers.get_constant_schedule_with_warmup(o, 5)),
        (Linear(lr=3.0, warmup_steps=5, total_steps=23), lambda o: transformers.get_linear_schedule_with_warmup(o, 5, 23)),
        (Linear(lr=3.0, total_steps=23), lambda o: transformers.get_linear_schedule_with_warmup(o, 0, 23)),
        (Cosine(lr=3.0, warmup_steps=5, total_steps=23), lambda o: transformers.get_cosine_schedule_with_warmup(o, 5, 23)),
        (Cosine(lr=3.0, warmup_steps=5, total_steps=23, min_ratio=0.1), cosine_with_min),
        *(
            (
                WSD(lr=3.0, warmup_steps=5, decay_steps=7, total_steps=23, shape=shape),
                lambda o, shape=shape: transformers.get_wsd_schedule(o, 5, 7, num_training_steps=23, decay_type=shape),
            )
            for shape in ("linear", "cosine", "1-sqrt")
        ),
        (
            WSD(lr=3.0, decay_steps=7, total_steps=23, min_ratio=0.1),
            lambda o: transformers.get_wsd_schedule(o, 0, 7, num_training_steps=23, decay_type="linear", min_lr_ratio=0.1),
        ),
    ],
    ids=lambda value: repr(value) if not callable(value) or isinstance(value, (Constant, Linear, Cosine, WSD)) else "",
)
def test_transformers(ours, make):
    """Update n has the rate of transformers' scheduler after n of its steps; its own update n has the one before.

    WSD is compared with warm-up or with a minimum, not both: transformers then starts warm-up at the minimum, mpar at 0.
    After the last step they differ as well: transformers' cosine rises again, mpar's stays.
    """
    theirs = of_transformers(make, 23)
    for step in range(1, 24):
        assert ours(step) == pytest.approx(theirs[step], rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Linear(lr=1.0), ["total_steps is missing"]),
        (lambda: Linear(lr=-1.0, total_steps=0), ["lr must be finite", "total_steps must be at least 1"]),
        (lambda: Linear(lr=float("nan"), total_steps=3), ["lr must be finite and not negative, not nan"]),
        (lambda: Cosine(lr=1.0, total_steps=9, warmup_steps=1, warmup_ratio=0.1), ["warmup_steps=1 and warmup_ratio=0.1"]),
        (lambda: Cosine(lr=1.0, total_steps=9, min_lr=1.0, min_ratio=0.1), ["min_lr=1.0 and min_ratio=0.1"]),
        (lambda: Cosine(lr=1.0, total_steps=9, min_lr=1.5), ["min_lr must be between 0 and lr=1.0, not 1.5"]),
        (lambda: Cosine(lr=1.0, total_steps=9, min_ratio=1.5), ["min_ratio must be between 0 and 1, not 1.5"]),
        (lambda: Constant(lr=1.0, warmup_ratio=0.5), ["warmup_ratio needs total_steps"]),
        (lambda: Constant(lr=1.0, warmup_steps=-1, min_lr=0.1), ["warmup_steps must not be negative", "has no min_lr"]),
        (lambda: Linear(lr=1.0, total_steps=9, warmup_steps=10), ["more than total_steps=9"]),
        (lambda: Linear(lr=1.0, total_steps=9, warmup_steps=9), ["leaves none to decay in"]),
        (lambda: WSD(lr=1.0, total_steps=9, decay_steps=5, warmup_steps=5), ["5 of decay do not fit in total_steps=9"]),
        (lambda: WSD(lr=1.0, total_steps=9, decay_steps=5, decay_ratio=0.5), ["decay_steps=5 and decay_ratio=0.5"]),
        (lambda: WSD(lr=1.0, total_steps=9, decay_steps=0), ["at least 1 step, not 0"]),
        (lambda: WSD(lr=1.0, total_steps=9, shape="exp"), ["shape 'exp' is unknown", "1-sqrt"]),
        (lambda: Constant(lr=1.0)(0), ["there is no update 0"]),
    ],
)
def test_what_is_refused(make, parts):
    """Contradictions raise ConfigError, with every one of them in the message."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_number_is_a_constant_rate():
    """`learning_rate` takes a LearningRate or a plain number."""
    assert [learning_rate(0.5, step) for step in (1, 100)] == [0.5, 0.5]
    assert learning_rate(Linear(lr=1.0, total_steps=4), 1) == 0.75


SHORT_RUNS = [(total, ratio) for total in (1, 2, 3, 4, 7) for ratio in (0.01, 0.1, 1 / 3, 0.5, 0.9, 0.99)]


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("total", "ratio"), SHORT_RUNS)
def test_warmup_of_short_runs(kind, total, ratio):
    """A ratio below 1 warms up for its share of the run, rounded up, and always leaves one step, so every kind can be made.

    Of a run of one step nothing is warm-up.
    """
    rate = kind(lr=3.0, total_steps=total, warmup_ratio=ratio)
    warmup = next(steps for steps in range(total) if steps >= ratio * total - 1e-6 or steps == total - 1)
    assert rate.num_warmup_steps == warmup
    rates = [rate(step) for step in range(1, total + 1)]
    assert rates[:warmup] == pytest.approx([3.0 * step / warmup for step in range(1, warmup + 1)], rel=1e-15)
    assert rates[-1] == (3.0 if kind is Constant else 0.0)


@pytest.mark.parametrize("total", [1, 2, 5])
@pytest.mark.parametrize("given", ["warmup_steps", "warmup_ratio"])
def test_warmup_as_long_as_the_run(given, total):
    """A constant rate reaches its peak at the last step, not before and not after; what decays has no step left to do it in."""
    warmup = {given: total if given == "warmup_steps" else 1.0}
    rate = Constant(lr=3.0, total_steps=total, **warmup)
    assert rate.num_warmup_steps == total
    assert [rate(step) for step in range(1, total + 3)] == pytest.approx([3 * s / total for s in range(1, total)] + [3.0] * 3)
    for kind in (Linear, Cosine, WSD):
        with pytest.raises(ConfigError, match=f"warm-up takes all {total} steps and leaves none to decay in; use Constant"):
            kind(lr=3.0, total_steps=total, **warmup)


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine, WSD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("total", [1, 2, 5])
def test_warmup_longer_than_the_run(kind, total):
    """It would never reach the peak: refused with both numbers, by one step as by many. Without an end a constant rate may."""
    for warmup in (total + 1, 100 * total):
        with pytest.raises(ConfigError, match=f"warm-up takes {warmup} steps, more than total_steps={total}$"):
            kind(lr=3.0, total_steps=total, warmup_steps=warmup)
    assert Constant(lr=3.0, warmup_steps=total + 1)(total + 1) == 3.0


@pytest.mark.parametrize("warmup_steps", [3, 6, 48])
def test_warmup_ends_at_exactly_the_peak(warmup_steps):
    """Update w has lr to the last bit, though lr * w / w rounds to another number."""
    assert 0.1 * warmup_steps / warmup_steps != 0.1
    assert Constant(lr=0.1, warmup_steps=warmup_steps)(warmup_steps) == 0.1
