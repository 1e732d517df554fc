"""Kernels of routing and permutation against plain formulas in float64."""

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import CATALOGUE, Kernels, choose, implementation
from mpar.kernels import _permute as module
from mpar.kernels._moe_support import grouped_mm_supports

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
F32 = torch.float32
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def kernel(primitive):
    """Triton's implementation."""
    return implementation(primitive, "triton")


def route(logits, bias, *, k, score, normalise, order, groups, groups_kept, group_best, scale):
    """One token at a time, by sorting; differentiable in the logits."""
    weights, experts = [], []
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, 1)
    for row, score_row in zip(logits, scores, strict=True):
        value = (score_row if order == "pre" else row).detach()
        value = (value if bias is None else value + bias).tolist()
        size = len(value) // groups
        merit = [sum(sorted(value[g * size : (g + 1) * size])[-group_best:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-merit[g], g))[:groups_kept]
        chosen = sorted((e for e in range(len(value)) if e // size in best), key=lambda e: (-value[e], e))[:k]
        raw = torch.softmax(row[chosen], 0) if score == "softmax" and order == "post" else score_row[chosen]
        weights.append(scale * (raw / raw.sum() if normalise else raw))
        experts.append(chosen)
    return torch.stack(weights), torch.tensor(experts), scores


ROUTER = {"k": 2, "score": "softmax", "normalise": True, "order": "pre", "groups": 1, "groups_kept": 1} | {
    "group_best": 2,
    "scale": 1.0,
}
VARIANTS = {
    "mixtral": (8, False, {"order": "post"}),
    "qwen3": (128, False, {"k": 8}),
    "qwen2": (60, False, {"k": 4, "normalise": False}),
    "llama4": (16, False, {"k": 1, "score": "sigmoid", "normalise": False, "order": "post"}),
    "deepseek-v3": (256, True, {"k": 8, "score": "sigmoid", "groups": 8, "groups_kept": 4, "scale": 2.5}),
    "deepseek-v2": (16, True, {"k": 6, "normalise": False, "groups": 4, "groups_kept": 2, "group_best": 1, "scale": 16.0}),
    "groups of one": (6, True, {"k": 3, "order": "post", "groups": 6, "groups_kept": 4}),
    "one expert": (1, False, {"k": 1}),
    "all": (12, False, {"k": 12, "scale": 0.5}),
}


@pytest.mark.parametrize("shape", [(2, 5, 12), (12,), (2, 0, 12)], ids=str)
def test_router_keeps_leading_dims(shape, make_tensor, device):
    """A stack of sequences, one token or none: as its tokens in a row, forward and backward."""
    logits, params = make_tensor(shape), ROUTER | {"order": "post"}
    rows = logits.view(-1, 12)
    results, expected = (kernel("topk_router")(x, None, **params) for x in (logits, rows))
    for got, want, size in zip(results, expected, (2, 2, 12), strict=True):
        assert got.shape == (*shape[:-1], size) and torch.equal(got.view(-1, size), want)
    dweights = make_tensor(results[0].shape)
    dlogits = kernel("topk_router_bwd")(logits, *results[1:], dweights, None, **params)
    flat = kernel("topk_router_bwd")(rows, *expected[1:], dweights.view(-1, 2), None, **params)
    assert dlogits.shape == shape and torch.equal(dlogits.view(-1, 12), flat)


def spread_logits(make_tensor, num_tokens, num_experts, dtype):
    """Logits no two of which are near: rounding cannot change the choice."""
    order = make_tensor((num_tokens, num_experts)).argsort(1).double()
    return ((order - num_experts / 2) * (8 / num_experts)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_router_matches_float64(variant, dtype, make_tensor):
    """Weights, experts, scores and the gradient of the logits, for the routers of known models; 19 tokens leave a tail."""
    num_experts, biased, options = VARIANTS[variant]
    params = ROUTER | options
    logits = spread_logits(make_tensor, 19, num_experts, dtype)
    bias = spread_logits(make_tensor, 1, num_experts, F32)[0] if biased else None
    weights, experts, scores = kernel("topk_router")(logits, bias, **params)
    wide = logits.double().requires_grad_()
    expected, chosen, all_scores = route(wide, None if bias is None else bias.double(), **params)
    testing.assert_close(weights, expected, name="weights")
    assert experts.tolist() == chosen.tolist()
    testing.assert_close(scores, all_scores, name="scores")
    dweights, dscores = make_tensor(weights.shape), make_tensor(scores.shape)
    ((expected * dweights).sum() + (all_scores * dscores).sum()).backward()
    dlogits = kernel("topk_router_bwd")(logits, experts, scores, dweights, dscores, **params)
    assert dlogits.dtype == dtype
    if num_experts > 1:
        testing.assert_close(dlogits, wide.grad, name="dlogits")
    else:  # softmax of one number is constant
        assert dlogits.abs().max() < 1e-5


@pytest.mark.parametrize("order", ["pre", "post"])
def test_router_gradient_through_one_result_alone(order, make_tensor):
    """A missing cotangent counts as zero."""
    params = ROUTER | {"order": order}
    logits = spread_logits(make_tensor, 5, 12, F32)
    _, experts, scores = kernel("topk_router")(logits, None, **params)
    dweights, dscores = make_tensor(experts.shape), make_tensor(scores.shape)
    backward = kernel("topk_router_bwd")
    for got, cotangents in (((dweights, None), (dweights, 0 * dscores)), ((None, dscores), (0 * dweights, dscores))):
        actual = backward(logits, experts, scores, *got, **params)
        testing.assert_close(actual, backward(logits, experts, scores, *cotangents, **params))


def test_router_breaks_ties_by_the_lowest_index(device):
    """Equal logits, equal groups: the first experts of the first groups; also where all are -inf."""
    router = kernel("topk_router")
    assert router(torch.zeros(2, 40, device=device), None, **ROUTER | {"k": 3})[1].tolist() == [[0, 1, 2]] * 2
    grouped = ROUTER | {"k": 3, "groups": 4, "groups_kept": 2}
    assert router(torch.zeros(2, 8, device=device), None, **grouped)[1].tolist() == [[0, 1, 2]] * 2
    tied = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]], device=device)
    assert router(tied, None, **ROUTER | {"k": 4})[1].tolist() == [[1, 3, 2, 4]]
    lowest = torch.full((1, 8), -torch.inf, device=device)
    assert router(lowest, None, **grouped | {"order": "post"})[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_router_shows_nan(score, order, device):
    """A row with a NaN has NaN weights and distinct valid experts, the same as the reference has; other rows do not notice."""
    nan = float("nan")
    logits = torch.tensor([[0.0, nan, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0], [nan] * 4], device=device)
    params = ROUTER | {"k": 3, "score": score, "order": order, "groups": 2, "groups_kept": 2}
    weights, experts, scores = kernel("topk_router")(logits, None, **params)
    assert weights.isnan().all(1).tolist() == [True, False, True] and not weights[1].isnan().any()
    assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in experts.tolist())
    expected = implementation("topk_router")(logits, None, **params)
    assert torch.equal(experts, expected[1]) and torch.equal(scores.isnan(), expected[2].isnan())


def test_router_edges(device):
    """No tokens; sigmoids that all underflow give weights of zero."""
    weights, experts, scores = kernel("topk_router")(torch.empty(0, 4, device=device), None, **ROUTER)
    assert weights.shape == experts.shape == (0, 2) and scores.shape == (0, 4)
    assert kernel("topk_router_bwd")(torch.empty(0, 4, device=device), experts, scores, None, scores, **ROUTER).shape == (0, 4)
    low = torch.full((1, 4), -1e4, device=device)
    assert kernel("topk_router")(low, None, **ROUTER | {"score": "sigmoid"})[0].tolist() == [[0.0, 0.0]]


ROUTES = {
    "small": ([[2, 0], [5, 2], [2, -1], [0, 5], [7, 2]], 6),
    "one expert": ([[0], [0], [0]], 1),
    "none": ([], 4),
    "all to one": ([[3]] * 200, 5),
}


def random_route(num_tokens, k, num_experts, device):
    """`k` different experts for each token, some experts with none."""
    generator = torch.Generator().manual_seed(3)
    popularity = torch.rand(num_tokens, num_experts, generator=generator) ** 2
    popularity[:, :: max(2, num_experts // 3)] = 0.0
    return popularity.argsort(dim=1, descending=True, stable=True)[:, :k].to(device)


def check_order(experts, num_experts):
    """Against Python's sort, which is stable."""
    order, inverse, counts, offsets = kernel("expert_order")(experts, num_experts=num_experts)
    slots = [e if 0 <= e < num_experts else num_experts for e in experts.flatten().tolist()]
    expected = sorted(range(len(slots)), key=slots.__getitem__)
    assert order.tolist() == expected
    assert inverse.flatten()[order.long()].tolist() == list(range(len(slots)))
    assert counts.tolist() == [slots.count(e) for e in range(num_experts)]
    assert offsets.tolist() == counts.cumsum(0).tolist()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_expert_order_is_a_stable_sort(route, dtype, device):
    """Slots of equal experts stay in order; experts outside come last; empty experts count zero."""
    rows, num_experts = ROUTES[route]
    check_order(torch.tensor(rows, dtype=dtype, device=device).view(len(rows), -1 if rows else 2), num_experts)


@pytest.mark.parametrize("shape", [(300, 8, 128), (1025, 2, 8), (130, 4, 1000)], ids=str)
def test_expert_order_over_many_chunks(shape, device):
    """More slots than a chunk, tails, and as many experts as there is room for."""
    check_order(random_route(*shape, device).int(), shape[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 2, 24), (3, 1, 2049), (12, 8, 5), (5, 3, 520), (0, 2, 4)], ids=str)
def test_permutation_matches_float64(shape, dtype, make_tensor, device):
    """Rows by expert, weighted sums and both gradients, whatever the tails."""
    num_tokens, k, size = shape
    experts = random_route(num_tokens, k, 9, device)
    order, inverse, *_ = kernel("expert_order")(experts, num_experts=9)
    x, dy = make_tensor((num_tokens, size), dtype), make_tensor((num_tokens, size), dtype)
    assert torch.equal(kernel("permute")(x, inverse), x[order.long() // k])
    rows, weights = make_tensor((num_tokens * k, size), dtype), make_tensor((num_tokens, k))
    places = inverse.long()
    testing.assert_close(kernel("unpermute")(rows, inverse, None), rows.double()[places].sum(1), name="sum")
    expected, pull = testing.vjp(lambda r, w: torch.einsum("tkd,tk->td", r[places], w), rows.double(), weights.double())
    testing.assert_close(kernel("unpermute")(rows, inverse, weights), expected, name="y")
    drows, dweights = kernel("unpermute_bwd")(rows, inverse, weights, dy)
    for got, want, name in zip((drows, dweights), pull(dy.double()), ("drows", "dweights"), strict=True):
        testing.assert_close(got, want, name=name, rtol=TOLERANCE[dtype])


def test_there_and_back_is_the_identity(make_tensor, device):
    """Permute, then unpermute with weights 1 / K: exactly, for K a power of two."""
    x, experts = make_tensor((33, 20)), random_route(33, 4, 8, device)
    inverse = kernel("expert_order")(experts, num_experts=8)[1]
    assert torch.equal(kernel("unpermute")(kernel("permute")(x, inverse), inverse, torch.full((33, 4), 0.25, device=device)), x)


def test_permutation_reads_strided_operands(make_tensor, device):
    """Operands that are views: every second column, transposed weights, every second row."""
    x, rows, weights = make_tensor((5, 8)), make_tensor((20, 4)), make_tensor((2, 5))
    inverse = torch.randperm(10, generator=torch.Generator().manual_seed(1)).int().view(2, 5).T.to(device)
    order = inverse.flatten().argsort()
    assert torch.equal(kernel("permute")(x[:, ::2], inverse), x[order // 2, ::2])
    expected = torch.einsum("tkd,tk->td", rows[::2].double()[inverse.long()], weights.T.double())
    testing.assert_close(kernel("unpermute")(rows[::2], inverse, weights.T), expected)


def test_rows_beyond_two_to_the_31_elements(device):
    """The last of 2**31 / 64 rows and more is found: offsets are 64 bits wide."""
    num_rows, size = 2**25 + 2, 64
    rows = torch.empty(num_rows, size, dtype=torch.bfloat16, device=device)
    rows[-1], rows[0] = 3.0, 5.0
    inverse = torch.tensor([[num_rows - 1, 0]], dtype=torch.int32, device=device)
    y = torch.empty(1, size, dtype=torch.bfloat16, device=device)
    entry = module.tuned("unpermute", rows)
    module.launch(module._unpermute, (1, 1), rows, inverse, None, y, num_rows, size, on=rows, tuning=entry, K=2)
    assert y.tolist() == [[8.0] * size]


def test_kernels_refuse_in_words(device):
    """Why, for what they have no room or no arithmetic for."""
    with pytest.raises(KernelError, match="2000 experts: kernels have room for 1024"):
        kernel("expert_order")(torch.zeros(2, 2, device=device).int(), num_experts=2000)
    with pytest.raises(KernelError, match=r"no torch\.float64"):
        kernel("topk_router")(torch.zeros(2, 4, dtype=torch.float64, device=device), None, **ROUTER)
    with pytest.raises(KernelError, match="40 rows per token"):
        kernel("permute")(torch.zeros(2, 4, device=device), torch.zeros(2, 40, device=device).int())


def by_expert(x, w, ends):
    """Each group times its expert; rows after all groups are zero."""
    starts = [0, *ends[:-1]]
    parts = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends, strict=True))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], w.shape[2])])


GROUPS = {
    "uneven": [3, 3, 200, 201, 300],
    "all in one": [0, 300, 300, 300, 300],
    "rows of none": [2, 4, 6, 7, 170],
    "none": [0, 0, 0, 0, 0],
    "whole tiles": [128, 128, 256, 300, 300],
}


def close(actual, expected, name):
    """As `testing.assert_close`, in the dtype's tolerance; zeros are exact."""
    testing.assert_close(actual, expected, name=name)
    assert not actual[(expected == 0)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS.keys())
def test_grouped_matmul_matches_float64(ends, dtype, make_tensor, device):
    """The product with weights stored either way, and their gradient: empty groups, rows of none, tails of all dims."""
    x, w, dy = make_tensor((300, 72), dtype), make_tensor((5, 72, 136), dtype), make_tensor((300, 136), dtype)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    expected, pull = testing.vjp(lambda x, w: by_expert(x, w, ends), x.double(), w.double())
    dx, dw = pull(dy.double())
    close(kernel("grouped_matmul")(x, w, offsets), expected, "y")
    close(kernel("grouped_matmul")(dy, w.transpose(1, 2), offsets), dx, "dx")
    close(kernel("grouped_matmul_dw")(x, dy, offsets), dw, "dw")


def test_grouped_matmul_of_many_experts_with_few_rows(make_tensor, device):
    """128 experts, 8 for each of 20 tokens."""
    _, _, _, offsets = kernel("expert_order")(random_route(20, 8, 128, device), num_experts=128)
    x, w = make_tensor((160, 16)), make_tensor((128, 16, 8))
    close(kernel("grouped_matmul")(x, w, offsets), by_expert(x.double(), w.double(), offsets.tolist()), "y")


def test_what_is_not_finite_stays_with_its_expert(make_tensor, device):
    """NaN in rows of one expert, of x and of dy, spoils its products and its gradient, no other's; in rows of none nothing."""
    offsets = torch.tensor([3, 9, 18], device=device)
    x, w, dy = make_tensor((20, 16)), make_tensor((3, 16, 8)), make_tensor((20, 8))
    x[4], dy[5], x[19] = float("nan"), float("inf"), float("nan")
    y = kernel("grouped_matmul")(x, w, offsets)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [4] and y.isnan().any(1).sum() == 1
    dw = kernel("grouped_matmul_dw")(x, dy, offsets)
    assert dw.isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_grouped_matmul_reads_views(make_tensor, device):
    """Operands that descriptors cannot load are copied: odd offsets, a stride of two, weights with neither dim contiguous."""
    offsets = torch.tensor([3, 9], device=device)
    x, w = make_tensor((10, 40))[:, 3:19], make_tensor((2, 32, 16))[:, ::2, ::2]
    close(kernel("grouped_matmul")(x, w, offsets), by_expert(x.double(), w.double(), [3, 9]), "y")


def test_grouped_matmul_without_rows_or_columns(device):
    """No rows: an empty result, gradients of zero; no inner dim: zeros."""
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    multiply, gradient = kernel("grouped_matmul"), kernel("grouped_matmul_dw")
    x, w = torch.ones(0, 8, device=device), torch.ones(2, 8, 4, device=device)
    assert multiply(x, w, offsets).shape == (0, 4)
    assert not gradient(x, torch.ones(0, 4, device=device), offsets).any()
    assert not multiply(torch.ones(3, 0, device=device), w[:, :0], offsets).any()


def test_offsets_beyond_the_rows_touch_no_memory(make_tensor, device):
    """Ends that are too large are cut: rows that exist get what they should, and nothing else is read or written."""
    x, w = make_tensor((10, 8)), make_tensor((2, 8, 4))
    y = kernel("grouped_matmul")(x, w, torch.tensor([4, 10**6], device=device))
    close(y, by_expert(x.double(), w.double(), [4, 10]), "y")


@pytest.mark.parametrize("ends", [[3, 3, 20], [1, 2, 24]], ids=str)
def test_the_product_of_torch_agrees(ends, make_tensor, device):
    """torch's grouped product, where it has one: the same rows, zeros after the groups, the same gradient."""
    x, w, dy = (make_tensor(shape, torch.bfloat16) for shape in ((24, 16), (3, 16, 8), (24, 8)))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    expected, pull = testing.vjp(lambda x, w: by_expert(x, w, ends), x.double(), w.double())
    dx, dw = pull(dy.double())
    multiply, gradient = (implementation(name, "grouped_mm") for name in ("grouped_matmul", "grouped_matmul_dw"))
    close(multiply(x, w, offsets), expected, "y")
    close(multiply(dy, w.transpose(1, 2), offsets), dx, "dx")
    close(gradient(x, dy, offsets), dw, "dw")


def test_choice_of_grouped_products():
    """Triton's is first; with a row of 12 bytes neither fits, and the reasons say so; torch's takes no float32."""
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x, w, offsets = torch.empty(8, 16, **meta), torch.empty(2, 16, 8, **meta), torch.empty(2, device="meta").int()
    assert choose(Kernels("auto", "sm_90"), "grouped_matmul", (x, w, offsets), {}) == ("triton", "")
    name, why = choose(Kernels("auto", "sm_90"), "grouped_matmul", (x[:, :6], w[:, :6], offsets), {})
    assert name == "reference" and why.count("rows of x of 12 bytes") == 2
    assert "bfloat16 from sm_90" in grouped_mm_supports("sm_80", x, w, offsets)


def test_workspace_is_said():
    """What the sort and the list of tiles allocate, and the copy of an operand that descriptors cannot load."""
    order, multiply = (CATALOGUE[name][0].workspace for name in ("expert_order", "grouped_matmul"))
    assert order(torch.empty(1024, 2, device="meta"), num_experts=128) == 4 * 256 * 3
    x, w, offsets = torch.empty(640, 32, device="meta"), torch.empty(2, 16, 8, device="meta"), torch.empty(2, device="meta")
    assert multiply(x[:, :16], w, offsets) == 12 * (10 + 3)
    assert multiply(x[:, 1:17], w.transpose(1, 2).contiguous().transpose(1, 2), offsets) == 12 * (10 + 3) + 640 * 16 * 4


@pytest.mark.gpu
def test_sort_and_carry_at_the_size_of_a_model(make_tensor, device):
    """16384 tokens to 8 of 128 experts: torch's stable sort gives the same order; two runs give the same bits."""
    experts = random_route(16384, 8, 128, device)
    order, inverse, counts, _ = kernel("expert_order")(experts, num_experts=128)
    assert torch.equal(order.long(), experts.flatten().sort(stable=True).indices)
    assert torch.equal(counts.long(), torch.bincount(experts.flatten(), minlength=128))
    x, dy = make_tensor((16384, 2048), torch.bfloat16), make_tensor((16384, 2048), torch.bfloat16)
    weights = make_tensor((16384, 8))
    rows = kernel("permute")(x, inverse)
    assert torch.equal(rows, x[order.long() // 8])
    y = kernel("unpermute")(rows, inverse, weights)
    testing.assert_close(y, x.double() * weights.double().sum(1, keepdim=True), name="y")
    runs = [kernel("unpermute_bwd")(rows, inverse, weights, dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    testing.assert_close(runs[0][1], (x.double() * dy.double()).sum(1, keepdim=True).expand(-1, 8), name="dweights", rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_matmul_at_the_size_of_a_model(dtype, make_tensor, device):
    """32768 rows of 64 experts, some without rows, at every entry of the table: products and gradients, twice the same bits."""
    _, _, counts, offsets = kernel("expert_order")(random_route(4096, 8, 64, device), num_experts=64)
    assert int(counts.min()) == 0
    x, w, dy = (make_tensor(shape, dtype) for shape in ((32768, 1024), (64, 1024, 768), (32768, 768)))
    ends = offsets.tolist()
    calls = {
        "y": lambda: kernel("grouped_matmul")(x, w, offsets),
        "dx": lambda: kernel("grouped_matmul")(dy, w.transpose(1, 2), offsets),
        "dw": lambda: kernel("grouped_matmul_dw")(x, dy, offsets),
    }
    expected, pull = testing.vjp(lambda x, w: by_expert(x, w, ends), x.double(), w.double())
    for (name, call), want in zip(calls.items(), (expected, *pull(dy.double())), strict=True):
        actual = call()
        close(actual, want, name)
        assert torch.equal(actual, call()), name
