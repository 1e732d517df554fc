"""Factors of dims: split, joined, and kept whole."""

import torch

from mpar.models.traced._dims import Dims, Factor
from mpar.models.traced._layout import LeafLayout
from mpar.sharding import trace


def dims_of(fn, *shapes):
    """The factors of every argument of `fn`."""
    logical = trace(fn, [torch.empty(shape, device="meta") for shape in shapes])
    dims = Dims(logical)
    return [dims.of(node) for node in logical.placeholders]


def test_a_reshape_splits_a_dim():
    """The 12 rows of a matrix are 3 heads of 4, because its product is cut so."""
    x, w = dims_of(lambda x, w: (x @ w.T).view(5, 3, 4).sum(2), (5, 7), (12, 7))
    assert [factor.size for factor in w[0]] == [3, 4] and x[1][0] is w[1][0]


def test_what_an_op_needs_whole_cannot_be_sharded():
    """A softmax needs its dim whole, and says so; the other dim it leaves alone."""
    ((rows, columns),) = dims_of(lambda x: torch.softmax(x, 1), (3, 5))
    assert not rows[0].whole and "softmax" in columns[0].whole


def test_a_choice_among_columns_needs_them_whole():
    """A router's scores stay on one rank: ranks could choose among shards, but by messages that no strategy asked for."""
    x, w = dims_of(lambda x, w: (x @ w).topk(2, -1).values, (5, 7), (7, 6))
    assert "topk" in w[1][0].whole and not x[0][0].whole


def test_factors_join_and_split():
    """Splitting a factor that is another one splits both."""
    a, b = Factor(12), Factor(12)
    a.join(b)
    b.split(3)
    assert [leaf.size for leaf in a.leaves()] == [3, 4] and a.leaves()[0] is b.leaves()[0]


def test_a_layout_says_how_a_tensor_is_stored():
    """As weight maps write it."""
    layout = LeafLayout(((4, 16), (64,)), ("heads", None, "embed"))
    assert layout.transform() == "(a b) c -> a b c" and layout.transform(joined=0) == "+(a b) c -> a b c"
    assert layout.shape == (4, 16, 64) and layout.stored_shape == (64, 64)
