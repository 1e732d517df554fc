"""Routing, permutation and grouped products against plain formulas in float64."""

import pytest
import torch

from mpar import ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError
from mpar.ops.experts._grouped_matmul import grouped_matmul_dw_p

F64 = torch.float64


def route(logits, bias=None, *, k, score="softmax", normalise=True, order="pre", groups=1, kept=1, scale=1.0):
    """One token at a time, by sorting pairs; differentiable in the logits."""
    weights, experts = [], []
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    for row, score_row in zip(logits, scores, strict=True):
        value = (score_row if order == "pre" else row).detach()
        value = (value if bias is None else value + bias).tolist()
        size = len(value) // groups
        merit = [sum(sorted(value[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-merit[g], g))[:kept]
        chosen = sorted((e for e in range(len(value)) if e // size in best), key=lambda e: (-value[e], e))[:k]
        raw = score_row[chosen]
        if score == "softmax" and order == "post":
            raw = torch.exp(row[chosen]) / torch.exp(row[chosen]).sum()
        weights.append(scale * (raw / raw.sum() if normalise else raw))
        experts.append(chosen)
    return torch.stack(weights), torch.tensor(experts), scores


VARIANTS = {
    "mixtral": {"k": 2, "order": "post"},
    "qwen3": {"k": 3},
    "qwen2": {"k": 3, "normalise": False},
    "llama4": {"k": 1, "score": "sigmoid", "normalise": False, "order": "post"},
    "deepseek-v3": {"k": 3, "score": "sigmoid", "groups": 4, "kept": 2, "scale": 2.5, "bias": True},
    "biased post": {"k": 2, "order": "post", "bias": True, "normalise": False, "scale": 0.5},
    "all": {"k": 12},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_router_is_the_formula(variant, make_tensor):
    """Weights, experts, scores and the gradient through weights and scores, for the routers of known models."""
    options = dict(VARIANTS[variant])
    bias = make_tensor((12,), F64) if options.pop("bias", False) else None
    logits, dweights, dscores = (make_tensor(shape, F64) for shape in ((7, 12), (7, options["k"]), (7, 12)))
    expected, experts, scores = route(reference := logits.clone().requires_grad_(), bias, **options)
    options["groups_kept"] = options.pop("kept", 1)
    got = ops.topk_router(actual := logits.clone().requires_grad_(), bias, **options)
    testing.assert_close(got[0], expected, name="weights")
    assert got[1].tolist() == experts.tolist() and got[1].dtype == torch.int32
    testing.assert_close(got[2], scores, name="scores")
    for results, x in ((got, actual), ((expected, experts, scores), reference)):
        ((results[0] * dweights).sum() + (results[2] * dscores).sum()).backward()
        assert x.grad is not None
    testing.assert_close(actual.grad, reference.grad, name="dlogits")


@pytest.mark.parametrize("which", [0, 2], ids=["weights", "scores"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_router_gradient_through_one_result_alone(which, order, make_tensor):
    """An auxiliary loss reads scores only, a model without one weights only."""
    logits, dy = make_tensor((4, 6), F64), make_tensor((4, 6 if which else 2), F64)
    expected, pull = testing.vjp(lambda x: route(x, k=2, order=order)[which], logits)
    actual, pull_back = testing.vjp(lambda x: ops.topk_router(x, k=2, order=order)[which], logits)
    testing.assert_close(actual, expected)
    testing.assert_close(pull_back(dy)[0], pull(dy)[0], name="dlogits")


def test_router_breaks_ties_by_the_lowest_index():
    """Equal logits, equal groups: the first experts of the first groups."""
    flat = torch.zeros(2, 8)
    assert ops.topk_router(flat, k=3)[1].tolist() == [[0, 1, 2]] * 2
    assert ops.topk_router(flat, k=3, groups=4, groups_kept=2)[1].tolist() == [[0, 1, 2]] * 2
    tied = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]])
    assert ops.topk_router(tied, k=4)[1].tolist() == [[1, 3, 2, 4]]


def test_router_bias_changes_the_choice_only():
    """The biased expert is taken with the weight of its own score."""
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=F64), torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=F64)
    weights, experts, scores = ops.topk_router(logits, bias, k=2, normalise=False)
    assert experts.tolist() == [[3, 0]]
    testing.assert_close(weights, scores[:, [3, 0]])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_router_shows_nan(score, order):
    """A row with a NaN has NaN weights and distinct valid experts; other rows are as if it were not there."""
    logits = torch.tensor([[0.0, float("nan"), 1.0, 2.0], [0.0, 1.0, 2.0, 3.0], [float("nan")] * 4])
    weights, experts, _ = ops.topk_router(logits, k=3, score=score, order=order, groups=2, groups_kept=2)
    assert weights.isnan().all(1).tolist() == [True, False, True] and not weights[1].isnan().any()
    assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in experts.tolist())


def test_router_without_tokens():
    """No tokens are routed to no experts."""
    weights, experts, scores = ops.topk_router(torch.empty(0, 4), k=2)
    assert weights.shape == experts.shape == (0, 2) and scores.shape == (0, 4)


def test_router_sigmoid_of_very_negative_logits_is_no_nan():
    """All scores underflow to zero: their normalised weights are zero, not 0 / 0."""
    weights, *_ = ops.topk_router(torch.full((1, 4), -1e4), k=2, score="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 1, 3, 8), (8,)], ids=str)
@pytest.mark.parametrize("options", [{"order": "post"}, {"score": "sigmoid", "groups": 4, "groups_kept": 2}], ids=str)
def test_router_takes_any_leading_dims(shape, options, make_tensor):
    """Results and gradient of a stack of sequences, or of one token, are those of its tokens in a row."""
    logits, bias = make_tensor(shape, F64), make_tensor((8,), F64)
    actual, pull_back = testing.vjp(lambda x: ops.topk_router(x, bias, k=3, **options)[::2], logits)
    expected, pull = testing.vjp(lambda x: ops.topk_router(x, bias, k=3, **options)[::2], logits.view(-1, 8))
    experts = ops.topk_router(logits, bias, k=3, **options)[1]
    assert experts.shape == (*shape[:-1], 3)
    assert torch.equal(experts.view(-1, 3), ops.topk_router(logits.view(-1, 8), bias, k=3, **options)[1])
    for got, want, size in zip(actual, expected, (3, 8), strict=True):
        assert got.shape == (*shape[:-1], size)
        testing.assert_close(got.view(-1, size), want)
    cotangents = tuple(make_tensor(got.shape, F64) for got in actual)
    dlogits = pull_back(cotangents)[0]
    assert dlogits.shape == shape
    testing.assert_close(dlogits.view(-1, 8), pull(tuple(dy.view(-1, dy.shape[-1]) for dy in cotangents))[0], name="dlogits")


def test_router_batches(make_tensor):
    """vmap over a leading dim gives what each example gives."""
    logits = make_tensor((3, 5, 6), F64)
    weights, experts, _ = torch.vmap(lambda x: ops.topk_router(x, k=2))(logits)
    for i, example in enumerate(logits):
        testing.assert_close(weights[i], ops.topk_router(example, k=2)[0])
        assert torch.equal(experts[i], ops.topk_router(example, k=2)[1])


def test_router_says_all_that_is_wrong():
    """Every number that does not fit is named at once."""
    with pytest.raises(ConfigError, match=r"(?s)k is 9.*score is 'relu'.*order is 'mid'.*groups is 3"):
        ops.topk_router(torch.empty(2, 8), k=9, score="relu", order="mid", groups=3)
    with pytest.raises(ConfigError, match="1 of 4 groups of 2 experts do not hold k = 3"):
        ops.topk_router(torch.empty(2, 8), k=3, groups=4)
    with pytest.raises(ShapeError, match=r"bias is \(3,\)"):
        ops.topk_router(torch.empty(2, 8), torch.empty(3), k=1)
    with pytest.raises(DtypeError, match="int64"):
        ops.topk_router(torch.zeros(2, 8).long(), k=1)


EXPERTS = torch.tensor([[2, 0], [5, 2], [2, -1], [0, 5], [7, 2]])


def test_expert_order_is_a_stable_sort():
    """Slots of equal experts stay in their order; experts that do not exist come last and are not counted."""
    order, inverse, counts, offsets = ops.expert_order(EXPERTS, num_experts=6)
    slots = EXPERTS.flatten().tolist()
    expected = sorted(range(10), key=lambda slot: (slots[slot] if 0 <= slots[slot] < 6 else 6, slot))
    assert order.tolist() == expected
    assert inverse.flatten().tolist() == [expected.index(slot) for slot in range(10)]
    assert counts.tolist() == [2, 0, 4, 0, 0, 2] and offsets.tolist() == [2, 2, 6, 6, 6, 8]


def test_permute_takes_tokens_to_experts(make_tensor):
    """Row r is the token of slot order[r]; its gradient sums over the slots of a token."""
    x, drows = make_tensor((5, 3), F64), make_tensor((10, 3), F64)
    order, inverse, *_ = ops.expert_order(EXPERTS, num_experts=6)
    expected, pull = testing.vjp(lambda x: x[order.long() // 2], x)
    rows, pull_back = testing.vjp(lambda x: ops.permute(x, inverse), x)
    assert torch.equal(rows, expected)
    testing.assert_close(pull_back(drows)[0], pull(drows)[0], name="dx")


def test_unpermute_is_a_weighted_sum(make_tensor):
    """The sum over slots and its gradients in rows and weights, with weights and without."""
    rows, weights, dy = make_tensor((10, 3), F64), make_tensor((5, 2), F64), make_tensor((5, 3), F64)
    inverse = ops.expert_order(EXPERTS, num_experts=6)[1]
    expected, pull = testing.vjp(lambda rows, w: torch.einsum("tkd,tk->td", rows[inverse.long()], w), rows, weights)
    y, pull_back = testing.vjp(lambda rows, w: ops.unpermute(rows, inverse, w), rows, weights)
    testing.assert_close(y, expected, name="y")
    for got, want, name in zip(pull_back(dy), pull(dy), ("drows", "dweights"), strict=True):
        testing.assert_close(got, want, name=name)
    y, pull_back = testing.vjp(lambda rows: ops.unpermute(rows, inverse), rows)
    testing.assert_close(y, rows[inverse.long()].sum(1), name="sum")
    testing.assert_close(pull_back(dy)[0], dy[ops.expert_order(EXPERTS, num_experts=6)[0].long() // 2], name="drows")


def test_there_and_back_is_the_identity(make_tensor):
    """Permute, then unpermute with weights 1 / K, changes nothing: exactly, for K a power of two."""
    x = make_tensor((5, 3))
    inverse = ops.expert_order(EXPERTS, num_experts=6)[1]
    assert torch.equal(ops.unpermute(ops.permute(x, inverse), inverse, torch.full((5, 2), 0.5)), x)


def test_permutation_refuses_what_does_not_fit():
    """Shapes and dtypes are named."""
    inverse = torch.zeros(5, 2, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"x is \(4, 3\)"):
        ops.permute(torch.empty(4, 3), inverse)
    with pytest.raises(ShapeError, match=r"rows are \(9, 3\)"):
        ops.unpermute(torch.empty(9, 3), inverse)
    with pytest.raises(DtypeError, match="float32"):
        ops.expert_order(torch.zeros(5, 2), num_experts=3)
    with pytest.raises(ConfigError, match="num_experts is 0"):
        ops.expert_order(inverse, num_experts=0)


def by_expert(x, w, ends):
    """Each group times its expert; the rows after all groups are zero."""
    starts = [0, *ends[:-1]]
    parts = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], w.shape[2])])


GROUPS = {"uneven": [3, 3, 9, 10], "all in one": [0, 10, 10, 10], "no rows at the end": [2, 4, 6, 7], "none": [0, 0, 0, 0]}


@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS.keys())
def test_grouped_matmul_is_a_product_per_expert(ends, make_tensor):
    """The product and both gradients; an empty group has a gradient of zero."""
    x, w, dy = make_tensor((10, 5), F64), make_tensor((4, 5, 3), F64), make_tensor((10, 3), F64)
    expected, pull = testing.vjp(lambda x, w: by_expert(x, w, ends), x, w)
    y, pull_back = testing.vjp(lambda x, w: ops.grouped_matmul(x, w, torch.tensor(ends)), x, w)
    testing.assert_close(y, expected, name="y")
    for got, want, name in zip(pull_back(dy), pull(dy), ("dx", "dw"), strict=True):
        testing.assert_close(got, want, name=name)


def test_grouped_matmul_without_rows():
    """No rows: no result, gradients of zero."""
    w = torch.ones(2, 3, 4, requires_grad=True)
    y = ops.grouped_matmul(torch.empty(0, 3), w, torch.zeros(2, dtype=torch.int32))
    y.sum().backward()
    assert y.shape == (0, 4) and not w.grad.any()


@pytest.mark.parametrize("ends", [[3, 2, 9, 9], [1, 2, 3, 11], [-1, 2, 3, 4]], ids=str)
def test_grouped_matmul_refuses_offsets_that_are_no_ends(ends):
    """Ends that fall, exceed the rows or are negative."""
    with pytest.raises(ShapeError, match="do not divide 10 rows"):
        ops.grouped_matmul(torch.empty(10, 5), torch.empty(4, 5, 3), torch.tensor(ends))


def test_grouped_matmul_refuses_what_does_not_fit():
    """Shapes and dtypes are named; the gradient of a gradient of weights has no rule."""
    ends = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"w is \(4, 6, 3\)"):
        ops.grouped_matmul(torch.empty(10, 5), torch.empty(4, 6, 3), ends)
    with pytest.raises(DtypeError, match="bfloat16"):
        ops.grouped_matmul(torch.empty(10, 5), torch.empty(4, 5, 3, dtype=torch.bfloat16), ends)
    for x, dy in (((10, 5, 1), (10, 3)), ((10, 5), (10, 3, 1)), ((10, 5), (9, 3))):
        with pytest.raises(ShapeError, match="grouped_matmul_dw: x is"):
            grouped_matmul_dw_p.bind(torch.ones(x), torch.ones(dy), ends)


def moe(x, router, gate, up, down):
    """A mixture of three experts for each token."""
    weights, experts, _ = ops.topk_router(ops.einsum("td,de->te", x, router), k=3)
    _, inverse, _, offsets = ops.expert_order(experts, num_experts=router.shape[1])
    rows = ops.permute(x, inverse)
    hidden = ops.swiglu(ops.grouped_matmul(rows, gate, offsets), ops.grouped_matmul(rows, up, offsets))
    return ops.unpermute(ops.grouped_matmul(hidden, down, offsets), inverse, weights)


def moe_by_tokens(x, router, gate, up, down):
    """The same token by token, expert by expert."""
    out = []
    for token in x:
        p, experts = torch.softmax(token @ router, 0).topk(3)
        parts = [(torch.nn.functional.silu(token @ gate[e]) * (token @ up[e])) @ down[e] for e in experts]
        out.append(sum(weight * part for weight, part in zip(p / p.sum(), parts, strict=True)))
    return torch.stack(out)


def test_a_layer_of_experts_is_the_loop_over_tokens(make_tensor):
    """All of it together, and every gradient."""
    shapes = ((13, 8), (8, 7), (7, 8, 6), (7, 8, 6), (7, 6, 8))
    operands = [make_tensor(shape, F64) for shape in shapes]
    dy = make_tensor((13, 8), F64)
    expected, pull = testing.vjp(moe_by_tokens, *operands)
    y, pull_back = testing.vjp(moe, *operands)
    testing.assert_close(y, expected, name="y")
    names = ("dx", "drouter", "dgate", "dup", "ddown")
    for got, want, name in zip(pull_back(dy), pull(dy), names, strict=True):
        testing.assert_close(got, want, name=name)
