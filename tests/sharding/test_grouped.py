"""Convolutions and group norms on shards of their groups: right, and without a gather."""

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, testing, value_and_grad
from mpar.errors import ShardingError
from mpar.sharding import _grouped, collectives_of

MESH = Mesh(a=2, b=2)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


CASES = {
    "depthwise": (lambda x, w, v: F.conv1d(x, w, v, groups=8), (8, 1, 3), (8,)),
    "groups of two": (lambda x, w, v: F.conv1d(x, w, v, groups=4), (8, 2, 3), (8,)),
    "more outputs": (lambda x, w, v: F.conv1d(x, w, v, padding=1, groups=4), (12, 2, 3), (12,)),
    "without a bias": (lambda x, w, v: F.conv1d(x, w, groups=4) * v[:, None], (8, 2, 3), (8,)),
    "transposed": (lambda x, w, v: F.conv_transpose1d(x, w, v, groups=4), (8, 3, 2), (12,)),
    "group norm": (lambda x, w, v: F.group_norm(x, 4, w, v), (8,), (8,)),
}
SPECS = [(P("a", "b"), P("b"), P("b")), (P(None, ("a", "b")), P(("a", "b")), P(("a", "b")))]


def compiled(fn, args, specs):
    loss = lambda primals: fn(*primals).sin().sum()  # noqa: E731
    return jit(lambda *args: (fn(*args), value_and_grad(loss)(args)), mesh=MESH, in_specs=specs).lower(*args)


@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_groups_stay_where_they_are(name, specs):
    """Value and gradients are those of torch, and nothing is gathered."""
    fn, *shapes = CASES[name]
    args = [numbers(4, 8, 5), *(numbers(*shape) for shape in shapes)]
    lowered = compiled(fn, args, specs)
    assert {found.op for found in collectives_of(lowered.ranked)} <= {"all_reduce"}
    value, (_, gradients) = lowered.simulate(*args)
    testing.assert_close(value, fn(*args), name=name)
    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(fn(*leaves).sin().sum(), leaves)
    for actual, gradient in zip(gradients, expected, strict=True):
        testing.assert_close(actual, gradient, name=name)


def test_a_group_is_not_cut():
    """Two groups on four ranks: their channels are gathered."""
    fn = lambda x, w, v: F.group_norm(x, 2, w, v)  # noqa: E731
    args = [numbers(4, 8, 5), numbers(8), numbers(8)]
    lowered = compiled(fn, args, SPECS[1])
    testing.assert_close(lowered.simulate(*args)[0], fn(*args), name="two groups")


def test_channels_of_a_group_are_not_independent(monkeypatch):
    """If the table says that the groups are in the channels, the check finds by a run of the op that this is wrong."""
    placed = _grouped._rule

    def swapped(node, operands, *others):
        rule = placed(node, operands, *others)
        swap = lambda dims: tuple(names[::-1] for names in dims)  # noqa: E731
        rule.factors, rule.results, rule.replicate = [*map(swap, rule.factors)], [*map(swap, rule.results)], {"g"}
        return rule

    monkeypatch.setattr(_grouped, "_rule", swapped)
    with pytest.raises(ShardingError, match=r"ill-typed rank graph.*native_group_norm"):
        jit(lambda x: F.group_norm(x, 4), mesh=MESH, in_specs=P(None, "b")).lower(numbers(4, 8, 5))
