"""The contract of an optimizer: what a subclass gets for what it says, and what is refused before a step is compiled."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from mpar import tree
from mpar.errors import ConfigError
from mpar.optim import SGD, AdamW, Optimizer, check_optimizer
from mpar.testing import assert_close

MEMBERS = ("slots", "init", "update", "update_leaf", "decays", "rate", "scale")


@dataclass(frozen=True)
class Lion(Optimizer):
    """p <- p (1 - lr decay) - lr sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g  (Chen et al. 2023, arXiv:2302.06675)."""

    lr: float
    weight_decay: float = 0.5
    slots: ClassVar[tuple[str, ...]] = ("m",)

    def update_leaf(self, param, grad, slots, lr, step, scale, *, decays):
        (m,), grad = slots, grad * scale
        decayed = param * (1 - lr * self.weight_decay * decays)
        return decayed - lr * torch.sign(0.9 * m + 0.1 * grad), (0.99 * m + 0.01 * grad,)

    def decays(self, path, leaf):
        return path == "w"

    def rate(self, step):
        return self.lr / step

    def scale(self, norm):
        return torch.ones_like(norm)


class Complete:
    """Every member and no base class."""

    slots = ("m",)

    def init(self, params): ...
    def update(self, grads, state, params, *, scale=1.0): ...
    def update_leaf(self, param, grad, slots, lr, step, scale, *, decays): ...
    def decays(self, path, leaf): ...
    def rate(self, step):
        return 0.1

    def scale(self, norm): ...


def test_five_members_are_enough():
    """A subclass that says five things has `init` and `update`; two updates of a tree follow the formula at falling rates."""
    params = {"w": torch.tensor([[1.0, -2.0]], dtype=torch.float64), "b": torch.tensor([3.0], dtype=torch.float64)}
    grads = {"w": torch.tensor([[4.0, -8.0]], dtype=torch.float64), "b": torch.tensor([0.0], dtype=torch.float64)}
    optimizer = Lion(0.1)
    check_optimizer(optimizer)
    state = optimizer.init(params)
    assert tree.paths(state) == ["step", "slots.m.w", "slots.m.b"]
    for _ in range(2):
        params, state = optimizer.update(grads, state, params, scale=0.5)
    first = torch.tensor([[1 * 0.95 - 0.1, -2 * 0.95 + 0.1]], dtype=torch.float64)
    second = first * (1 - 0.05 * 0.5) - 0.05 * torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    assert_close(params["w"], second, name="w")
    assert torch.equal(params["b"], torch.tensor([3.0], dtype=torch.float64))
    assert_close(state.slots["m"]["w"], grads["w"] * 0.5 * 0.01 * 1.99, name="m")
    assert int(state.step) == 2


@pytest.mark.parametrize("optimizer", [AdamW(0.1), SGD(0.1), SGD(0.1, momentum=0.9), Complete()], ids=lambda o: type(o).__name__)
def test_complete_optimizers_pass(optimizer):
    """Our own, and an object with all members that inherits none, are optimizers."""
    check_optimizer(optimizer)


def test_a_subclass_without_a_member_cannot_be_made():
    """Python itself names what a subclass of Optimizer does not say."""

    class Half(Optimizer):
        slots = ()

        def rate(self, step):
            return 0.1

    with pytest.raises(TypeError, match=r"decays.*scale.*update_leaf"):
        Half()


@pytest.mark.parametrize("missing", [(name,) for name in MEMBERS] + [("rate", "scale"), MEMBERS], ids=" ".join)
def test_missing_members_are_named(missing):
    """Each member that is not there is in the message with what it must be; those that are there are not."""
    members = {name: value for name, value in vars(Complete).items() if name in MEMBERS and name not in missing}
    with pytest.raises(ConfigError) as caught:
        check_optimizer(type("Other", (), {**members, "__repr__": lambda self: "Other(lr=0.1)"})())
    message = str(caught.value)
    assert "cannot compile a step with the optimizer Other(lr=0.1)" in message
    assert {name for name in MEMBERS if f"lacks `{name}`: " in message} == set(missing)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("rate", 0.1, "its `rate` is 0.1, which cannot be called: rate(step)"),
        ("rate", lambda self: 0.1, "its `rate()` cannot be called as it is (too many positional arguments)"),
        ("decays", None, "its `decays` is None, which cannot be called"),
        ("update_leaf", lambda self, param, grad, slots, lr, step, scale: None, "got an unexpected keyword argument 'decays'"),
        ("update_leaf", lambda self, p, g, s, lr, step, scale, extra, *, decays: None, "missing a required argument: 'extra'"),
        ("slots", ["m"], "its `slots` is ['m'], which is not a tuple"),
        ("slots", "m", "its `slots` is 'm'"),
        ("slots", ("a.b",), "names without dots"),
        ("slots", ("m", ""), "its `slots` is ('m', '')"),
        ("slots", ("m", "v", "m"), "its `slots` has ['m'] more than once"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_members_that_are_something_else(name, value, part):
    """What is there but is no such method, or no such tuple, is refused by the same check."""
    with pytest.raises(ConfigError) as caught:
        check_optimizer(type("Other", (Complete,), {name: value})())
    assert part in str(caught.value), str(caught.value)
    assert "lacks" not in str(caught.value)


def test_a_class_is_no_optimizer():
    """The class where an optimizer should be has all members, and none that can be called."""
    with pytest.raises(ConfigError, match=r"it is a class; pass an optimizer, such as AdamW\(\.\.\.\)"):
        check_optimizer(AdamW)


def test_all_problems_come_at_once():
    """One message has every member that is missing or wrong."""
    with pytest.raises(ConfigError) as caught:
        check_optimizer(type("Other", (Complete,), {"slots": 3, "scale": 1.0, "rate": lambda self, step, more: 0.0})())
    assert all(f"its `{name}" in str(caught.value) for name in ("slots", "scale", "rate")), str(caught.value)
