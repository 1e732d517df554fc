"""Each canonicalising pass on a small graph, printed before and after; what it changes, and what it leaves alone."""

import pytest
import torch

from mpar import Mesh, P, jit, ops, value_and_grad
from mpar.sharding import collectives_of, trace
from mpar.sharding._canonical import CANONICAL, canonicalise
from mpar.sharding._canonicalise import (
    common_subexpressions,
    erase_identities,
    merge_views,
    restore_einsums,
    shrink_constants,
    split_means,
    view_groups,
)
from mpar.sharding._expands import expand_late, merge_expands
from mpar.sharding._permute_late import permute_late

X = torch.empty(2, 3, 4, dtype=torch.float64, device="meta")
W = torch.empty(4, 5, dtype=torch.float64, device="meta")
C = torch.empty((), dtype=torch.float64, device="meta")


def text(graph):
    """A line a node: `name = op(operands)`."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            op = node.target.__name__.split(".")[0] if hasattr(node.target, "__name__") else str(node.target)
            given = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items() if k != "device"]
            lines.append(f"{node.name} = {op}({', '.join(given)})")
        elif node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
    return lines


def before_and_after(fn, *passes, args=(X, W)):
    logical = trace(fn, args, canonical=False)
    before = text(logical.graph)
    for run in passes:
        run(logical.graph)
    return before, text(logical.graph)


def test_erase_identities():
    """Copies, detached values and casts to the same dtype are their operand; a cast to another dtype stays."""
    before, after = before_and_after(lambda x, w: (x.clone().detach() * 2, x.to(torch.float64), x.float()), erase_identities)
    assert before == [
        "clone = clone(arg0_1)",
        "detach = detach(clone)",
        "mul = mul(detach, 2)",
        "_to_copy = _to_copy(arg0_1, dtype=torch.float32)",
        "return mul, arg0_1, _to_copy",
    ]
    assert after == [
        "mul = mul(arg0_1, 2)",
        "_to_copy = _to_copy(arg0_1, dtype=torch.float32)",
        "return mul, arg0_1, _to_copy",
    ]


def test_erase_identities_keeps_labels():
    """`ops.name` leaves its label on the value."""
    logical = trace(lambda x, w: ops.name(x * 2, "q"), (X, W), canonical=False)
    erase_identities(logical.graph)
    assert text(logical.graph) == ["mul = mul(arg0_1, 2)", "return mul"]
    assert logical.results[0].meta["labels"] == ("q",)


def test_restore_einsums():
    """A product of a matrix and a tensor of three dims is one einsum of the tensor itself."""
    before, after = before_and_after(lambda x, w: x @ w, restore_einsums, merge_views)
    assert before == [
        "view = view(arg0_1, [6, 4])",
        "mm = mm(view, arg1_1)",
        "_unsafe_view = _unsafe_view(mm, [2, 3, 5])",
        "return _unsafe_view",
    ]
    assert after == ["einsum_default_1 = einsum(arg0_1, arg1_1, equation=ABb,bc->ABc)", "return einsum_default_1"]


def test_restore_einsums_through_permutes():
    """Transposed operands are read as they are, under other letters."""
    _, after = before_and_after(lambda x, w: w.T @ x[0].T, restore_einsums)
    assert after == [
        "select = select(arg0_1, 0, 0)",
        "einsum_default_2 = einsum(arg1_1, select, equation=ba,cb->ac)",
        "return einsum_default_2",
    ]


def test_restore_einsums_splits_biases():
    """A product with a bias is a product, factors, and a sum."""
    before, after = before_and_after(lambda x, w: torch.addmm(w[0], x[0], w, beta=2, alpha=3), restore_einsums)
    assert before[2:] == ["addmm = addmm(select, select_1, arg1_1, beta=2, alpha=3)", "return addmm"]
    assert after[2:] == [
        "einsum_default = einsum(select_1, arg1_1, equation=ab,bc->ac)",
        "mul_tensor = mul(einsum_default, 3)",
        "mul_tensor_1 = mul(select, 2)",
        "add_tensor = add(mul_tensor, mul_tensor_1)",
        "return add_tensor",
    ]


def test_restore_einsums_leaves_integers():
    """Einsum is for floating dtypes; products of integers stay."""
    _, after = before_and_after(lambda x, w: x[0].long() @ w.long(), restore_einsums)
    assert after[-2:] == ["mm = mm(_to_copy, _to_copy_1)", "return mm"]


def test_split_means():
    """A mean is a sum over the global count."""
    before, after = before_and_after(lambda x, w: (x.mean(-1, keepdim=True), x.mean()), split_means)
    assert before == ["mean = mean(arg0_1, [-1], True)", "mean_1 = mean(arg0_1)", "return mean, mean_1"]
    assert after == [
        "sum_dim_int_list = sum(arg0_1, [-1], True)",
        "div_tensor = div(sum_dim_int_list, 4)",
        "sum_dim_int_list_1 = sum(arg0_1, [0, 1, 2], False)",
        "div_tensor_1 = div(sum_dim_int_list_1, 24)",
        "return div_tensor, div_tensor_1",
    ]


def test_shrink_constants():
    """A tensor full of one number is that number, expanded."""
    _, after = before_and_after(
        lambda x, w: (torch.zeros_like(x), torch.full((2,), 3.0, dtype=torch.float64), x.new_ones(4)), shrink_constants
    )
    assert after == [
        "full_default = full([], 0, dtype=torch.float64)",
        "expand_default = expand(full_default, [2, 3, 4])",
        "full_default_1 = full([], 3.0, dtype=torch.float64)",
        "expand_default_1 = expand(full_default_1, [2])",
        "full_default_2 = full([], 1, dtype=torch.float64)",
        "expand_default_2 = expand(full_default_2, [4])",
        "return expand_default, expand_default_1, expand_default_2",
    ]


def test_merge_views():
    """Chains of reshapes are one, chains of permutes are one or none."""
    before, after = before_and_after(
        lambda x, w: (
            x.reshape(6, 4).view(2, 12).unsqueeze(0), x.transpose(0, 1).permute(1, 0, 2), x.transpose(0, 1).permute(1, 2, 0)
        ),
        merge_views,
    )  # fmt: skip
    assert len(before) == 8
    assert after == [
        "unsqueeze = reshape(arg0_1, [1, 2, 12])",
        "permute_1 = permute(arg0_1, [0, 2, 1])",
        "return unsqueeze, arg0_1, permute_1",
    ]


def test_permute_late():
    """Values that are permuted alike are joined as they lie; those that are permuted unlike, or not at all, are left alone."""
    _, after = before_and_after(
        lambda x, w: (
            torch.cat([x.permute(2, 0, 1), x.exp().permute(2, 0, 1)], -1),
            torch.cat([x.permute(2, 0, 1), x.exp().permute(2, 1, 0)[:, :2]], -1),
            torch.cat([x, x.transpose(0, 1)[:2]], 1),
        ),
        permute_late,
    )
    assert after[1:3] == ["cat_default = cat([arg0_1, exp], 1)", "permute_default = permute(cat_default, [2, 0, 1])"]
    assert sum("= cat(" in line for line in after) == 3
    assert after[-1].startswith("return permute_default, cat_1, cat_2")


def test_common_subexpressions():
    """Equal nodes are one; nodes that differ in a flag or in the type of a number are not equal."""
    _, after = before_and_after(
        lambda x, w: (x.sin() + x.sin(), x.sum(1), x.sum(1, keepdim=True), x * 1, x * 1.0), common_subexpressions
    )
    assert after == [
        "sin = sin(arg0_1)",
        "add = add(sin, sin)",
        "sum_1 = sum(arg0_1, [1])",
        "sum_2 = sum(arg0_1, [1], True)",
        "mul = mul(arg0_1, 1)",
        "mul_1 = mul(arg0_1, 1.0)",
        "return add, sum_1, sum_2, mul, mul_1",
    ]


def test_merge_expands():
    """Chains of expands are one or none; a view of one spread number is an expand, a view of a spread vector is not."""
    _, after = before_and_after(
        lambda x, w: (w[0, 0].expand(6).expand(2, 6).view(3, 4), w.expand(4, 5), w[0].expand(3, 5).reshape(15)),
        erase_identities,
        merge_views,
        merge_expands,
    )
    assert after == [
        "select = select(arg1_1, 0, 0)",
        "select_1 = select(select, 0, 0)",
        "view = expand(select_1, [3, 4])",
        "select_2 = select(arg1_1, 0, 0)",
        "expand_3 = expand(select_2, [3, 5])",
        "_unsafe_view = reshape(expand_3, [15])",
        "return view, arg1_1, _unsafe_view",
    ]


def test_expand_late():
    """Element-wise ops read what is not expanded yet, and their result is expanded where nothing else makes it large."""
    before, after = before_and_after(lambda x, c: (c.expand(2, 3, 4) / 3 + x, c.expand(5).exp()), expand_late, args=(X, C))
    assert before == [
        "expand = expand(arg1_1, [2, 3, 4])",
        "div = div(expand, 3)",
        "add = add(div, arg0_1)",
        "expand_1 = expand(arg1_1, [5])",
        "exp = exp(expand_1)",
        "return add, exp",
    ]
    assert after == [
        "div_tensor = div(arg1_1, 3)",
        "add_tensor = add(div_tensor, arg0_1)",
        "exp_default = exp(arg1_1)",
        "expand_default_1 = expand(exp_default, [5])",
        "return add_tensor, expand_default_1",
    ]


def test_expand_late_keeps_dtypes():
    """A number of another dtype stays expanded: as one number it would count less when dtypes are promoted."""
    fn = lambda x, c: (x.float() * c.expand(2, 3, 4), x.float() > c.expand(4))  # noqa: E731
    before, after = before_and_after(fn, expand_late, args=(X, C))
    assert after == before


FUNCTIONS = {
    "gradient of a mean": lambda x, w: torch.func.grad(lambda x: ((x @ w).sin().mean(1) / 3).mean())(x),
    "masks": lambda x, w: torch.where(torch.ones_like(x).bool(), x, torch.zeros(3, 4, dtype=x.dtype)) + x.new_full((4,), 0.5),
    "views": lambda x, w: (x.transpose(0, 2).reshape(4, 6).unsqueeze(1) * w.sum(1)[:, None, None]).flatten(),
    "expands": lambda x, w: (w[0, 0].expand(2, 3, 4).exp() * x).sum(0) + w[:, 1].expand(3, 4).sqrt().nan_to_num(),
    "products": lambda x, w: torch.addmm(w[0], x[0], w, alpha=0.5) @ torch.einsum("abc,cd->db", x, w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_passes_keep_values(name):
    """The canonical graph computes what the function does."""
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (X, W)]
    logical = trace(FUNCTIONS[name], args)
    module = torch.fx.GraphModule(logical.constants, logical.graph)
    torch.testing.assert_close(module(*args)[0], FUNCTIONS[name](*args), rtol=1e-14, atol=1e-14)


def test_passes_are_idempotent():
    """A canonical graph has nothing left to change, but for what is counted when it is only renamed."""
    for fn in FUNCTIONS.values():
        logical = trace(fn, (X, W))
        before = text(logical.graph)
        canonicalise(logical.graph)
        assert text(logical.graph) == before


def test_every_pass_says_what_it_does():
    """A pass has a picture of before and after."""
    for run in CANONICAL:
        assert "before:" in run.__doc__ and "after:" in run.__doc__, run.__name__


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
        ((4, 6), (3, 8), [([0, 1], [0, 1])]),
        ((2, 1), (2,), [([0], [0]), ([1], [])]),
        ((), (1,), [([], [0])]),
    ],
)
def test_view_groups(before, after, groups):
    """A reshape falls apart where products of sizes meet."""
    assert view_groups(before, after) == groups


def test_gradient_of_a_product_by_heads_gathers_nothing():
    """Torch merges batch and heads for a product of matrices, and permutes them merged for the gradient: heads stay sharded."""
    q, k = (torch.randn(4, 4, 8, 6, dtype=torch.float64) for _ in range(2))
    fn = lambda q, k: value_and_grad(lambda pair: (pair[0] @ pair[1].mT).sin().sum())([q, k])  # noqa: E731
    lowered = jit(fn, mesh=Mesh(a=4), in_specs=P(None, "a")).lower(q, k)
    assert [found.op for found in collectives_of(lowered.ranked)] == ["all_reduce"]
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    gradients = torch.autograd.grad((leaves[0] @ leaves[1].mT).sin().sum(), leaves)
    for actual, expected in zip(lowered.simulate(q, k)[1], gradients, strict=True):
        torch.testing.assert_close(actual, expected)
