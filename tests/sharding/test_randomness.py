"""Random numbers on a mesh: every rank draws its shard, and the numbers are those of the plain call."""

import warnings

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing
from mpar.sharding import ReplicatedFallback

KEY = torch.tensor([3, 4])


def residual_dropout(x, key):
    return x + ops.dropout(x.sin(), 0.5, key)


def noise(x, key):
    return x * ops.random_normal(ops.fold_in(key, 7), x.shape) + ops.random_uniform((1, 2), x.shape)


def noise_of_rows(x, key):
    return x * ops.random_normal(key, x.shape[:1])[:, None] + ops.random_uniform(key, ())


def dropout_of_examples(x, key):
    keys = torch.stack([ops.fold_in(key, i) for i in range(len(x))])
    return torch.func.vmap(lambda row, key: ops.dropout(row, 0.3, key))(x, keys)


FUNCTIONS = [residual_dropout, noise, noise_of_rows, dropout_of_examples]
PLACES = [(Mesh(a=2, b=2), P("a", "b")), (Mesh(a=2, b=2), P(("a", "b"))), (Mesh(a=4), P(None, "a")), (Mesh(a=2), P(partial="a"))]


def compile_(fn, args, mesh, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        return jit(fn, mesh=mesh, in_specs=(spec, P())).lower(*args)


@pytest.mark.parametrize(("mesh", "spec"), PLACES, ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_numbers_are_the_same_on_every_mesh(fn, mesh, spec):
    """In the value and in the gradient."""
    x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8).cos()
    args = (x, KEY)
    testing.assert_close(compile_(fn, args, mesh, spec).simulate(*args), fn(*args), name="value")

    def gradient(x, key):
        return torch.func.grad(lambda x: fn(x, key).square().sum())(x)

    testing.assert_close(compile_(gradient, args, mesh, spec).simulate(*args), gradient(*args), name="gradient")


@pytest.mark.parametrize("fn", [residual_dropout, noise], ids=lambda fn: fn.__name__)
def test_a_rank_draws_its_shard_only(fn):
    """No rank draws the numbers of others, and nothing is communicated."""
    lowered = compile_(fn, (torch.zeros(8, 8), KEY), Mesh(a=2, b=2), P("a", "b"))
    assert lowered.collectives() == []
    drawn = [node.meta["val"].shape for node in lowered.ranked.graph.nodes if "mpar.random" in str(node.target)]
    assert all(shape == (4, 4) for shape in drawn)
