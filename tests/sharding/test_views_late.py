"""Views come after the ops that can do without them: graphs before and after, values, and what is no longer gathered."""

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing
from mpar.sharding import trace
from mpar.sharding._canonicalise import merge_views
from mpar.sharding._flatten_late import flatten_late
from mpar.sharding._split_indices import split_indices
from mpar.sharding._unit_dims import drop_unit_letters, insert_unit_dims_late
from tests.sharding.test_canonicalise import text

MESH = Mesh(dp=2, sp=2)


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def after(fn, *args, passes=(merge_views, flatten_late)):
    logical = trace(fn, args, canonical=False)
    for run in passes:
        run(logical.graph)
    return text(logical.graph)


def test_unit_dims_are_inserted_after_a_permute():
    """The permute moves only the dims that the tensor has."""
    fn = lambda x: x[:, :, None].permute(2, 1, 0)  # noqa: E731
    assert after(fn, numbers(2, 3), passes=(merge_views, insert_unit_dims_late)) == [
        "permute_default = permute(arg0_1, [1, 0])",
        "reshape_default = reshape(permute_default, [1, 3, 2])",
        "return reshape_default",
    ]


def test_unit_dims_are_given_to_a_product_after_it():
    """An einsum reads its operands without the dims of size 1 that views gave them, unless nothing else would be left of one."""
    passes = (merge_views, drop_unit_letters, merge_views)
    fn = lambda x, w: ops.einsum("zab,zbc->zac", x[None], w[None])  # noqa: E731
    assert after(fn, numbers(2, 3), numbers(3, 4), passes=passes) == [
        "einsum_default = einsum(arg0_1, arg1_1, equation=ab,bc->ac)",
        "reshape_default_2 = reshape(einsum_default, [1, 2, 4])",
        "return reshape_default_2",
    ]
    scaled = lambda x, w: ops.einsum("a,bc->abc", x.reshape(1), w)  # noqa: E731
    assert after(scaled, numbers(1, 1), numbers(3, 4), passes=passes) == [
        "view = reshape(arg0_1, [1])",
        "einsum = einsum(view, arg1_1, equation=a,bc->abc)",
        "return einsum",
    ]


def test_a_permute_comes_before_a_view_that_splits_and_merges():
    """Such a view is one that splits, whose dims can be permuted, and one that merges."""
    fn = lambda x: x.reshape(8, 3, 8).permute(0, 2, 1)  # noqa: E731
    assert after(fn, numbers(4, 6, 8), passes=(merge_views, merge_views)) == [
        "reshape_default = reshape(arg0_1, [4, 2, 3, 8])",
        "permute_default = permute(reshape_default, [0, 1, 3, 2])",
        "reshape_default_1 = reshape(permute_default, [8, 8, 3])",
        "return reshape_default_1",
    ]
    cut_across = lambda x: x.reshape(8, 3).permute(1, 0)  # noqa: E731
    assert after(cut_across, numbers(6, 4), passes=(merge_views, merge_views)) == [
        "view = reshape(arg0_1, [8, 3])",
        "permute = permute(view, [1, 0])",
        "return permute",
    ]


def test_an_index_is_read_before_its_dims_are_merged():
    """A choice of rows, and a sum of rows, take the index as it is; an index that is flat from the start stays."""
    passes = (merge_views, split_indices, merge_views)
    fn = lambda x, i, y: x.index_add(0, i.flatten(), y.flatten(0, 1)).index_select(1, i.flatten())  # noqa: E731
    assert after(fn, TABLE, INDEX, ROWS, passes=passes) == [
        "index_put_default = index_put(arg0_1, [arg1_1], arg2_1, True)",
        "index_tensor = index(index_put_default, [None, arg1_1])",
        "reshape_default = reshape(index_tensor, [8, 24])",
        "return reshape_default",
    ]
    flat = (TABLE, INDEX.flatten(), ROWS)
    assert after(fn, *flat, passes=passes) == after(fn, *flat, passes=(merge_views,))


def test_a_bias_is_added_before_dims_are_merged():
    """An element-wise op reads what the view reads; an operand that is broadcast over the merged dim stays as it is."""
    assert after(lambda x, b: x.flatten(0, 1) + b, numbers(2, 3, 4), numbers(4)) == [
        "add_tensor = add(arg0_1, arg1_1)",
        "reshape_default = reshape(add_tensor, [6, 4])",
        "return reshape_default",
    ]


def test_a_tensor_that_is_flat_from_the_start_stays():
    """If an operand has only the merged dim, nothing is moved."""
    fn = lambda x, y: x.flatten(0, 1) + y  # noqa: E731
    assert after(fn, numbers(2, 3, 4), numbers(6, 4)) == after(fn, numbers(2, 3, 4), numbers(6, 4), passes=(merge_views,))


ROWS, INDEX = numbers(4, 6, 8), torch.randint(8, (4, 6), generator=torch.Generator().manual_seed(0))
WEIGHT, BIAS, TABLE = numbers(5, 8), numbers(5), numbers(8, 8)
LATE = {
    "a linear layer with a bias": lambda x, i: torch.nn.functional.linear(x, WEIGHT, BIAS),
    "a column": lambda x, i: (x.flatten(0, 1) * x.sum(-1).flatten()[:, None]).view(x.shape),
    "a softmax to the left of the merged dim": lambda x, i: x.flatten(0, 1).t().softmax(0).t().reshape(x.shape),
    "a sum to the left of the merged dim": lambda x, i: x.flatten(0, 1).t().sin().sum(0).view(4, 6),
    "a sum over the merged dim": lambda x, i: x.flatten(0, 1).sin().sum(0),
    "a sum that keeps dims": lambda x, i: x.flatten(0, 1).sin().sum(-1, keepdim=True).view(4, 6),
    "a choice by index": lambda x, i: x.flatten(0, 1).log_softmax(1).gather(1, i.flatten()[:, None]).view(4, 6),
    "windows that are mixed": lambda x, i: torch.einsum("bnwd,wv->bnvd", x.unflatten(1, (-1, 3)), WEIGHT[:3, :4]),
    "a weighted sum of matrices": lambda x, i: torch.einsum("b,bij->ij", x.sum((1, 2)), x.sin()),
    "matrices of parts": lambda x, i: x.reshape(8, 3, 8).mT.reshape(4, 2, 8, 3),
    "sums by index": lambda x, i: x.new_zeros(8, 8).index_add(0, i.flatten(), x.flatten(0, 1)),
    "sums of columns by index": lambda x, i: x.new_zeros(8, 8).index_add(1, i.flatten(), x.flatten(0, 1).T),
    "counts by index": lambda x, i: x.new_zeros(8).scatter_add(0, i.flatten(), x.new_ones(24)),
    "a look-up": lambda x, i: TABLE[i.flatten()].view(4, 6, 8) + TABLE.index_select(1, i.flatten()).T.view(4, 6, 8),
    "a cross-entropy": lambda x, i: torch.nn.functional.cross_entropy(x.flatten(0, 1), i.flatten(), label_smoothing=0.1),
}


@pytest.mark.cases(15)
@pytest.mark.parametrize("name", LATE)
def test_split_batches_and_sequences_are_merged_without_a_gather(name):
    """Values are exact, and no rank receives tokens of another."""
    lowered = jit(LATE[name], mesh=MESH, in_specs=(P("dp", "sp"), P("dp", "sp"))).lower(ROWS, INDEX)
    testing.assert_close(lowered.simulate(ROWS, INDEX), LATE[name](ROWS, INDEX))
    assert not [each for each in lowered.collectives() if each.op == "all_gather"], lowered


def test_values_are_exact_where_the_result_is_flat():
    """A softmax along the merged dim cannot come first; the view stays before it."""
    fn = lambda x, i: x.flatten(0, 1).t().softmax(1)  # noqa: E731
    lowered = jit(fn, mesh=MESH, in_specs=(P("dp", "sp"), P("dp", "sp"))).lower(ROWS, INDEX)
    testing.assert_close(lowered.simulate(ROWS, INDEX), fn(ROWS, INDEX))
