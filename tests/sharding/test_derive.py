"""The check of rank graphs finds out by itself what ops do: a wrong entry in the table of the lowering does not pass."""

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit
from mpar.errors import ShardingError
from mpar.sharding import _rules
from mpar.sharding._derive import derived_rule
from mpar.sharding._pass_through import Across
from mpar.sharding._rules import PROGRAMS, RULES, NodeRule, has_rule

aten = torch.ops.aten
MESH = Mesh(a=2)
X = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 7


def passes_pending_sums(node):
    rule = _rules.pointwise(node)
    rule.linear = {0}
    return rule


def stays_replicated(node):
    """Takes the operand as it lies and says that the result is the same on all ranks."""
    (x,) = _rules.tensor_operands(node)
    return NodeRule([x], [((),) * x.meta["val"].ndim], [((),) * node.meta["val"].ndim], {}, as_is={0})


def shards_every_dim(node):
    """Element-wise, whatever the op does along its dim."""
    return _rules.pointwise(node)


PLANTS = {
    "relu lets a pending sum pass": (aten.relu.default, passes_pending_sums, torch.relu, P(partial="a")),
    "tanh lets a pending sum pass": (aten.tanh.default, passes_pending_sums, torch.tanh, P(partial="a")),
    "amax over shards is whole": (aten.amax.default, stays_replicated, lambda x: x.amax(0), P("a")),
    "sum over shards is whole": (aten.sum.dim_IntList, stays_replicated, lambda x: x.sum(0), P("a")),
    "amax of parts adds up": (aten.amax.default, _rules._sum, lambda x: x.amax(0), P("a")),
    "cumsum along shards": (aten.cumsum.default, shards_every_dim, lambda x: x.cumsum(0), P("a")),
    "flip along shards": (aten.flip.default, shards_every_dim, lambda x: x.flip(0), P("a")),
    "roll along shards": (aten.roll.default, shards_every_dim, lambda x: x.roll(1, 0), P("a")),
    "softmax along shards": (aten._softmax.default, shards_every_dim, lambda x: x.softmax(0), P("a")),
    "triangle of shards": (aten.tril.default, shards_every_dim, lambda x: x.tril(), P("a")),
    "sort along shards": (aten.sort.default, shards_every_dim, lambda x: x.sort(0).values, P("a")),
    "pool of shards": (aten.avg_pool2d.default, Across(1), lambda x: F.avg_pool2d(x[None], (3, 1), 1, (1, 0)), P("a")),
    "spectrum of shards": (aten._fft_c2c.default, Across(0), lambda x: torch.fft.fft(x + 0j, dim=0).real, P("a")),
    "median lets a pending sum pass": (aten.median.dim, Across(linear="self"), lambda x: x.median(1).values, P(partial="a")),
    "cumprod lets a pending sum pass": (aten.cumprod.default, Across(linear="self"), lambda x: x.cumprod(1), P(partial="a")),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_entry_of_the_table_is_refused(name, monkeypatch):
    """The lowering believes its table; the check names the op and what is wrong with it."""
    op, entry, fn, spec = PLANTS[name]
    monkeypatch.setitem(RULES, op, entry)
    monkeypatch.delitem(PROGRAMS, op, raising=False)
    with pytest.raises(ShardingError, match=rf"ill-typed rank graph.*{op}"):
        jit(fn, mesh=MESH, in_specs=spec).lower(X)


@pytest.mark.filterwarnings("ignore::mpar.sharding.ReplicatedFallback")
@pytest.mark.parametrize("name", PLANTS)
def test_the_right_entry_is_accepted(name):
    """With the table as it is, the same functions compile and are right."""
    _, _, fn, spec = PLANTS[name]
    actual = jit(fn, mesh=MESH, in_specs=spec).lower(X).simulate(X)
    torch.testing.assert_close(actual, fn(X))


LINEAR = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "neg": lambda x, y: -x,
    "mul": lambda x, y: x * y,
    "scale": lambda x, y: x * 3.0,
    "div": lambda x, y: x / y,
    "tril": lambda x, y: x.tril(),
    "flip": lambda x, y: x.flip(0),
    "sum": lambda x, y: x.sum(1),
    "mm": lambda x, y: (x * 8).long() @ (y.T * 8).long(),
    "reshape": lambda x, y: x.reshape(2, 12),
    "permute": lambda x, y: x.T,
    "slice": lambda x, y: x[1:3],
    "relu": lambda x, y: x.relu(),
    "add number": lambda x, y: x + 1.0,
    "inverse": lambda x, y: 1.0 / x,
    "square": lambda x, y: x * x,
    "maximum": lambda x, y: torch.maximum(x, y),
    "cumsum": lambda x, y: x.cumsum(0),
    "amax": lambda x, y: x.amax(0),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linearity_is_true(name):
    """Where the check lets pending sums pass, f(a + b) = f(a) + f(b): in one operand, or in all together."""
    fn = LINEAR[name]
    graph = jit(fn, mesh=Mesh(a=1)).lower(X, X).ranked.logical.graph
    for node in (node for node in graph.nodes if node.op == "call_function" and has_rule(node)):
        rule = derived_rule(node)
        values = [torch.randn(n.meta["val"].shape, dtype=torch.float64) for n in rule.operands]
        more = [torch.randn(n.meta["val"].shape, dtype=torch.float64) for n in rule.operands]

        def run(given, node=node, rule=rule):
            remaining = iter(given)
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: next(remaining))
            return node.target(*args, **kwargs)

        for index in rule.linear:
            both = [v + m if i == index else v for i, (v, m) in enumerate(zip(values, more, strict=True))]
            other = [m if i == index else v for i, (v, m) in enumerate(zip(values, more, strict=True))]
            torch.testing.assert_close(run(both), run(values) + run(other))
        if rule.jointly:
            torch.testing.assert_close(run([v + m for v, m in zip(values, more, strict=True)]), run(values) + run(more))
