"""Counts, capacities and Sinkhorn's scaling against loops over slots in Python."""

import math

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing
from mpar.errors import ConfigError, DifferentiationError, DtypeError, ShapeError

F64 = torch.float64


@pytest.mark.parametrize("shape", [(3, 5, 2), (4, 2), (6,), (2, 0, 3), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_counts_are_of_slots_that_name_an_expert(shape, dtype):
    """Every id in range counts once; those outside on either side count nowhere."""
    experts = torch.randint(-2, 7, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = experts.clone()
    counts = ops.expert_counts(experts, num_experts=5)
    assert counts.tolist() == [experts.flatten().tolist().count(e) for e in range(5)]
    assert counts.dtype == torch.int32 and torch.equal(experts, before)


def test_counts_refuse_what_does_not_fit():
    """Floats, no dims and no experts are named."""
    with pytest.raises(DtypeError, match="float32"):
        ops.expert_counts(torch.zeros(2, 2), num_experts=3)
    with pytest.raises(ShapeError, match=r"experts are \(\)"):
        ops.expert_counts(torch.tensor(1), num_experts=3)
    with pytest.raises(ConfigError, match="num_experts is 0"):
        ops.expert_counts(torch.zeros(2, 2).int(), num_experts=0)


def limited(experts, weights, order, num_experts, capacity):
    """The slots of each expert, sorted in Python by falling weight and their original place; the first `capacity` stay."""
    kept = torch.full_like(experts, -1)
    B, S, K = experts.shape
    for e in range(num_experts):
        slots = [(b, s, k) for b in range(B) for s in range(S) for k in range(K) if experts[b, s, k] == e]
        place = lambda s: s if order is None else int(order[s])  # noqa: E731
        slots.sort(key=lambda at: (-float(weights[at]), at[0], place(at[1]), at[2]))
        for slot in slots[:capacity]:
            kept[slot] = e
    return kept


ORDER = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])


@pytest.mark.parametrize("order", [None, ORDER, ORDER.flip(0)], ids=["stored", "zigzag", "backwards"])
@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "distinct"])
def test_capacity_keeps_the_heaviest_slots(order, capacity, levels):
    """Of each expert's slots the heaviest are kept, of equal ones those that come first originally; ids outside become -1."""
    generator = torch.Generator().manual_seed(2)
    experts = torch.randint(-1, 6, (3, 8, 2), generator=generator)
    weights = torch.randint(0, levels, (3, 8, 2), generator=generator).to(F64) / levels
    kept = ops.limit_capacity(experts, weights, order, num_experts=5, capacity=capacity)
    assert torch.equal(kept, limited(experts, weights, order, 5, capacity).int()) and kept.dtype == torch.int32


def test_capacity_does_not_depend_on_how_tokens_are_stored():
    """A permutation of the tokens, told by their order, drops the same slots, even where all weights are equal."""
    generator = torch.Generator().manual_seed(3)
    experts, weights = torch.randint(0, 3, (2, 8, 2), generator=generator), torch.ones(2, 8, 2)
    kept = ops.limit_capacity(experts, weights, num_experts=3, capacity=4)
    moved = ops.limit_capacity(experts[:, ORDER], weights[:, ORDER], ORDER, num_experts=3, capacity=4)
    assert torch.equal(moved, kept[:, ORDER]) and (kept == -1).sum() == 32 - 12


@pytest.mark.parametrize("shape", [(6, 2), (2, 1, 3, 2), (0, 2), (2, 0, 2), (2, 2, 0, 2)], ids=str)
def test_capacity_takes_any_leading_dims(shape):
    """One sequence, stacks of them, and none."""
    generator = torch.Generator().manual_seed(4)
    experts, weights = torch.randint(0, 3, shape, generator=generator), torch.rand(shape, generator=generator)
    order = torch.arange(shape[-2]).flip(0)
    kept = ops.limit_capacity(experts, weights, order, num_experts=3, capacity=2)
    rows = math.prod(shape[:-2]), *shape[-2:]
    assert kept.shape == shape
    assert torch.equal(kept.view(rows), limited(experts.view(rows), weights.view(rows), order, 3, 2).int())


def test_capacity_shows_nan():
    """A slot whose weight is NaN is not the one that is dropped."""
    weights = torch.tensor([[0.3], [math.nan], [0.9], [math.inf]])
    assert ops.limit_capacity(torch.zeros(4, 1).int(), weights, num_experts=1, capacity=2).tolist() == [[-1], [0], [-1], [0]]


def test_capacity_batches_example_by_example():
    """vmap limits each example on its own."""
    experts, weights = torch.zeros(3, 4, 1).int(), torch.rand(3, 4, 1)
    kept = torch.vmap(lambda e, w: ops.limit_capacity(e, w, num_experts=1, capacity=2))(experts, weights)
    assert (kept == 0).sum((1, 2)).tolist() == [2, 2, 2]


def test_capacity_refuses_what_does_not_fit():
    """Shapes, dtypes and numbers are named."""
    experts, weights = torch.zeros(2, 3, 2).int(), torch.zeros(2, 3, 2)
    numbers = {"num_experts": 4, "capacity": 1}
    with pytest.raises(ShapeError, match=r"weights \(2, 3, 1\)"):
        ops.limit_capacity(experts, weights[..., :1], **numbers)
    with pytest.raises(ShapeError, match=r"order \(2,\)"):
        ops.limit_capacity(experts, weights, torch.arange(2), **numbers)
    with pytest.raises(DtypeError, match=r"order.*float32"):
        ops.limit_capacity(experts, weights, torch.zeros(3), **numbers)
    with pytest.raises(DtypeError, match="int64; weights must be floating"):
        ops.limit_capacity(experts, weights.long(), **numbers)
    with pytest.raises(ConfigError, match="capacity 0"):
        ops.limit_capacity(experts, weights, num_experts=4, capacity=0)


def scaled(logits, tolerance, max_iterations):
    """Rows and columns of exp(logits) by turns, number by number."""
    cost = [[math.exp(x) for x in row] for row in logits.tolist()]
    num_tokens, num_experts = len(cost), len(cost[0])
    columns = [1.0] * num_experts
    for _ in range(max_iterations):
        rows = [1 / num_tokens / (sum(c * x for c, x in zip(columns, row, strict=True)) + 1e-8) for row in cost]
        totals = [sum(r * row[e] for r, row in zip(rows, cost, strict=True)) for e in range(num_experts)]
        before, columns = columns, [1 / num_experts / (total + 1e-8) for total in totals]
        if sum(abs(a - b) for a, b in zip(before, columns, strict=True)) / num_experts <= tolerance:
            break
    return torch.tensor([[r * x * c for x, c in zip(row, columns, strict=True)] for r, row in zip(rows, cost, strict=True)])


@pytest.mark.parametrize(("tolerance", "most"), [(1e-4, 100), (1e-1, 100), (1e-9, 3), (1e-12, 1000)], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 4), (7, 3), (2, 1, 3, 4)], ids=str)
def test_sinkhorn_is_the_iteration(shape, tolerance, most, make_tensor):
    """The scaled matrix, whether the tolerance or the number of iterations ends it."""
    logits = 2 * make_tensor(shape, F64)
    actual = ops.sinkhorn(logits, tolerance=tolerance, max_iterations=most)
    torch.set_default_dtype(F64)
    try:
        expected = scaled(logits.view(-1, shape[-1]), tolerance, most)
    finally:
        torch.set_default_dtype(torch.float32)
    testing.assert_close(actual, expected.view(shape))


def test_sinkhorn_gives_every_token_and_every_expert_the_same_total(make_tensor):
    """Rows sum to 1 / T and columns to 1 / E, over the tokens of all sequences together."""
    y = ops.sinkhorn(3 * make_tensor((3, 4, 5), F64), tolerance=1e-13, max_iterations=10_000)
    testing.assert_close(y.sum(-1), torch.full((3, 4), 1 / 12, dtype=F64), rtol=1e-6)
    testing.assert_close(y.sum((0, 1)), torch.full((5,), 1 / 5, dtype=F64), rtol=1e-6)


def test_sinkhorn_leaves_out_rows_that_are_no_tokens(make_tensor):
    """Rows of -inf change nothing for the others, and are zero; with such rows alone there is nothing but zeros."""
    logits = 3 * make_tensor((2, 6, 5), F64)
    there = torch.tensor([[True, True, False, True, False, False], [True] * 5 + [False]])
    y = ops.sinkhorn(logits.masked_fill(~there[..., None], float("-inf")), tolerance=1e-9)
    testing.assert_close(y[there], ops.sinkhorn(logits[there], tolerance=1e-9))
    assert not y[~there].any() and not ops.sinkhorn(torch.full((3, 4), float("-inf"))).any()


def test_sinkhorn_ends_on_what_is_not_finite():
    """Overflow and NaN are shown; no tokens give none; narrow logits a float32 result."""
    assert ops.sinkhorn(torch.tensor([[0.0, 100.0], [0.0, 0.0]]), max_iterations=10**9).isnan().any()
    assert ops.sinkhorn(torch.empty(2, 0, 4)).shape == (2, 0, 4)
    assert ops.sinkhorn(torch.zeros(1, 2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_sinkhorn_has_no_gradient():
    """It says so, rather than stopping the gradient silently."""
    with pytest.raises(DifferentiationError, match="sinkhorn: it has no gradient rule"):
        ops.sinkhorn(torch.zeros(3, 4, requires_grad=True)).sum().backward()


def test_sinkhorn_refuses_what_does_not_fit():
    """Shapes, dtypes and numbers are named."""
    with pytest.raises(ShapeError, match=r"\(1, 2, 0\)"):
        ops.sinkhorn(torch.empty(2, 0))
    with pytest.raises(DtypeError, match="int64"):
        ops.sinkhorn(torch.zeros(2, 3).long())
    with pytest.raises(ConfigError, match=r"tolerance is 0\.0, max_iterations 0"):
        ops.sinkhorn(torch.zeros(2, 3), tolerance=0.0, max_iterations=0)


SPECS = {"sequences": P("x"), "positions": P(None, "x"), "both": P("x", "y")}


def on_ranks(fn, *operands, specs):
    """What `fn` gives on the ranks of a mesh of 2 x 2, and the kinds of its collectives."""
    lowered = jit(fn, mesh=Mesh(x=2, y=2), in_specs=specs).lower(*operands)
    return lowered.simulate(*operands), {collective.op for collective in lowered.collectives()}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_counts_of_ranks_add_up(spec):
    """Ranks count their own tokens; nothing but the counts travels."""
    experts = torch.randint(-1, 5, (2, 4, 3), generator=torch.Generator().manual_seed(5))
    counts, kinds = on_ranks(lambda e: ops.expert_counts(e, num_experts=5), experts, specs=(spec,))
    assert counts.tolist() == [(experts == e).sum() for e in range(5)]
    assert kinds == {"all_reduce"}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_capacity_is_of_the_tokens_of_all_ranks(spec):
    """Slots compete across ranks."""
    generator = torch.Generator().manual_seed(6)
    experts, weights = torch.randint(0, 3, (2, 8, 2), generator=generator), torch.rand(2, 8, 2, generator=generator)
    fn = lambda e, w, order: ops.limit_capacity(e, w, order, num_experts=3, capacity=3)  # noqa: E731
    kept, _ = on_ranks(fn, experts, weights, ORDER, specs=(spec, spec, P(*spec.dims[1:2])))
    assert torch.equal(kept, limited(experts, weights, ORDER, 3, 3).int())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_sinkhorn_is_of_the_tokens_of_all_ranks(spec, make_tensor):
    """Totals run across ranks."""
    logits = make_tensor((2, 4, 3), F64)
    scaled_logits, _ = on_ranks(ops.sinkhorn, logits, specs=(spec,))
    testing.assert_close(scaled_logits, ops.sinkhorn(logits))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_routers_of_ranks_need_no_exchange(spec, make_tensor):
    """Tokens are routed where they are."""
    logits = make_tensor((2, 4, 6), F64)
    (weights, experts), kinds = on_ranks(lambda x: ops.topk_router(x, k=2)[:2], logits, specs=(spec,))
    expected = ops.topk_router(logits, k=2)
    testing.assert_close(weights, expected[0])
    assert torch.equal(experts, expected[1]) and not kinds
