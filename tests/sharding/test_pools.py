"""Average pools on shards of their windows."""

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, testing, value_and_grad
from mpar.errors import ShardingError
from mpar.sharding import _pools, collectives_of

MESH = Mesh(a=2, b=2)
X = torch.randn(2, 2, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CASES = {
    "side by side": (lambda x: F.avg_pool2d(x, (2, 3)), True),
    "of a vector": (lambda x: F.avg_pool1d(x[:, 0].transpose(1, 2), 2), True),
    "of a volume": (lambda x: F.avg_pool3d(x, (1, 2, 3)), True),
    "overlapping": (lambda x: F.avg_pool2d(x, (3, 3), (1, 3), (1, 0)), False),
    "rows left out": (lambda x: F.avg_pool2d(x, (3, 3)), False),
    "rows added": (lambda x: F.avg_pool2d(x, 2, padding=1), False),
}
SPEC = P(None, None, "a", "b")


@pytest.mark.filterwarnings("ignore::mpar.sharding.ReplicatedFallback")
@pytest.mark.parametrize("name", CASES)
def test_average_pool(name):
    """Value and gradient are those of torch; only windows across shards gather."""
    fn, alone = CASES[name]
    loss = lambda x: fn(x).sin().sum()  # noqa: E731
    lowered = jit(lambda x: (fn(x), value_and_grad(loss)(x)), mesh=MESH, in_specs=SPEC).lower(X)
    assert ({found.op for found in collectives_of(lowered.ranked)} <= {"all_reduce"}) == alone
    value, (_, gradient) = lowered.simulate(X)
    testing.assert_close(value, fn(X), name=name)
    leaf = X.clone().requires_grad_()
    testing.assert_close(gradient, torch.autograd.grad(loss(leaf), leaf)[0], name=name)


@pytest.mark.filterwarnings("ignore::mpar.sharding.ReplicatedFallback")
def test_windows_that_overlap_are_not_independent(monkeypatch):
    """If the table says so, the check finds by a run of the op that this is wrong."""
    given = _pools.argument
    wrong = lambda node, name: [3, 3] if name == "stride" else [0, 0] if name == "padding" else given(node, name)  # noqa: E731
    monkeypatch.setattr(_pools, "argument", wrong)
    with pytest.raises(ShardingError, match=r"ill-typed rank graph.*avg_pool2d"):
        jit(lambda x: F.avg_pool2d(x, 3, 1, 1), mesh=MESH, in_specs=P(None, None, None, "a")).lower(X)
