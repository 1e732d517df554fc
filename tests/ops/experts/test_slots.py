"""Slots of experts, and capacities and counts of groups of tokens, against loops over groups and tokens in float64."""

import math

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing
from mpar.errors import ConfigError, DtypeError, ShapeError

F64 = torch.float64
B, S, K, E, D = 4, 6, 2, 5, 3
GROUPS = [(1, 1), (2, 1), (1, 3), (2, 3), (4, 6)]


def chosen(seed: int = 1, low: int = -1, high: int = E) -> torch.Tensor:
    return torch.randint(low, high, (B, S, K), generator=torch.Generator().manual_seed(seed)).int()


def places(groups):
    """Of each group: its place among groups, and the (b, s) of its tokens in storage order."""
    (g, h), (rows, positions) = groups, (B // groups[0], S // groups[1])
    for i in range(g):
        for j in range(h):
            tokens = [(i * rows + b, j * positions + s) for b in range(rows) for s in range(positions)]
            yield (i, j), tokens


def slots_by_hand(experts, capacity, groups):
    """`slots` by counting the rows of each expert and group one after the other."""
    slots = torch.full_like(experts, -1)
    for _, tokens in places(groups):
        taken = [0] * E
        for b, s in tokens:
            for k in range(K):
                e = int(experts[b, s, k])
                if 0 <= e < E:
                    slots[b, s, k] = e * capacity + taken[e] if taken[e] < capacity else -1
                    taken[e] += 1
    return slots


def filled_by_hand(x, slots, weights, capacity, groups):
    """`rows` slot by slot; differentiable in x and weights."""
    rows = torch.zeros(E, *groups, capacity, D, dtype=F64)
    for (i, j), tokens in places(groups):
        for b, s in tokens:
            for k in range(K):
                if slots[b, s, k] >= 0:
                    e, c = divmod(int(slots[b, s, k]), capacity)
                    rows[e, i, j, c] = x[b, s] * (1 if weights is None else weights[b, s, k])
    return rows


def taken_by_hand(rows, slots, weights, capacity, groups):
    """`y` slot by slot; differentiable in rows and weights."""
    y = torch.zeros(B, S, D, dtype=F64)
    for (i, j), tokens in places(groups):
        for b, s in tokens:
            for k in range(K):
                if slots[b, s, k] >= 0:
                    e, c = divmod(int(slots[b, s, k]), capacity)
                    y[b, s] += rows[e, i, j, c] * (1 if weights is None else weights[b, s, k])
    return y


CHOICES = {
    "any": chosen(),
    "ids outside": chosen(2, -3, E + 3),
    "one expert": torch.full((B, S, K), 3).int(),
    "none": torch.full((B, S, K), -1).int(),
    "none for the first and the last": chosen(3, 1, E - 1).long(),
}


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("capacity", [1, 3, 50])
@pytest.mark.parametrize("choice", CHOICES)
def test_slots_are_given_in_storage_order(choice, capacity, groups):
    """Expert by expert and group by group; what comes after the last slot, and what goes nowhere, gets none."""
    experts = CHOICES[choice]
    slots = ops.expert_slots(experts, num_experts=E, capacity=capacity, groups=groups)
    assert slots.dtype == torch.int32
    assert torch.equal(slots, slots_by_hand(experts, capacity, groups).int())


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_filling_and_taking_are_loops_over_slots(choice, groups, weighted, make_tensor):
    """Rows, sums and all gradients: of tokens, rows and weights; slots without a token are zero, and are not read."""
    capacity = 3
    slots = ops.expert_slots(CHOICES[choice], num_experts=E, capacity=capacity, groups=groups)
    x, rows = make_tensor((B, S, D), F64), make_tensor((E, *groups, capacity, D), F64)
    weights = [make_tensor((B, S, K), F64)] * weighted
    none = (None,) * (not weighted)

    def fill(x, *w):
        return ops.fill_slots(x, slots, *w, num_experts=E, capacity=capacity, groups=groups)

    calls = [
        (fill, lambda x, *w: filled_by_hand(x, slots, *w, *none, capacity, groups), x),
        (lambda r, *w: ops.take_slots(r, slots, *w), lambda r, *w: taken_by_hand(r, slots, *w, *none, capacity, groups), rows),
    ]
    for ours, theirs, operand in calls:
        expected, pull = testing.vjp(lambda *x, theirs=theirs: theirs(*x) + 0 * sum(v.sum() for v in x), operand, *weights)
        actual, pull_back = testing.vjp(ours, operand, *weights)
        testing.assert_close(actual, expected)
        dy = make_tensor(expected.shape, F64)
        for got, want in zip(pull_back(dy), pull(dy), strict=True):
            testing.assert_close(got, want, name="gradient")


def test_second_derivatives(make_tensor):
    """Of the sum of squares of what is taken, with weights: its gradient is a function that can be differentiated."""
    slots = ops.expert_slots(chosen(), num_experts=E, capacity=2, groups=(2, 1))
    rows, weights = make_tensor((E, 2, 1, 2, D), F64), make_tensor((B, S, K), F64)
    take = lambda r, w: ops.take_slots(r, slots, w)  # noqa: E731
    by_hand = lambda r, w: taken_by_hand(r, slots, w, 2, (2, 1))  # noqa: E731

    def twice(fn):
        slope = torch.func.grad(lambda r, w: fn(r, w).square().sum(), argnums=(0, 1))
        dot = lambda r, w: sum((part * seed).sum() for part, seed in zip(slope(r, w), seeds, strict=True))  # noqa: E731
        return torch.func.grad(dot, argnums=(0, 1))

    seeds = make_tensor(rows.shape, F64), make_tensor(weights.shape, F64)
    for got, want in zip(twice(take)(rows, weights), twice(by_hand)(rows, weights), strict=True):
        testing.assert_close(got, want)


def test_sums_are_wide_and_skip_what_is_not_theirs():
    """In bfloat16 eight equal rows add up exactly; NaN in a slot without a token, or as the weight of none, is not seen."""
    slots = torch.tensor([[[0, 2, 4, 6, 8, 10, 12, -1]]])
    rows = torch.full((7, 1, 1, 2, 1), 1.0078125, dtype=torch.bfloat16)
    rows[:, :, :, 1] = math.nan
    weights = torch.ones(1, 1, 8)
    weights[..., 7] = math.nan
    y = ops.take_slots(rows, slots, weights)
    assert y.dtype == torch.bfloat16 and y.item() == torch.tensor(7 * 1.0078125).bfloat16().item()
    x = torch.tensor([[[1.0], [math.nan]]])
    filled = ops.fill_slots(x, torch.tensor([[[0], [-1]]]), num_experts=2, capacity=2)
    assert filled.flatten().tolist() == [1, 0, 0, 0]


def test_no_tokens():
    """Empty batches have groups and slots without tokens."""
    slots = ops.expert_slots(torch.empty(2, 0, K).int(), num_experts=E, capacity=2)
    assert not ops.fill_slots(torch.empty(2, 0, D), slots, num_experts=E, capacity=2).any()
    assert ops.take_slots(torch.ones(E, 1, 1, 2, D), slots).shape == (2, 0, D)


def test_what_does_not_fit_is_refused():
    """Numbers, shapes and dtypes are named."""
    numbers = {"num_experts": E, "capacity": 2}
    slots, x = ops.expert_slots(chosen(), **numbers), torch.zeros(B, S, D)
    with pytest.raises(ShapeError, match=r"4 x 6 tokens into token groups \(3, 4\): 3 does not divide the 4 s.* 4 does.* 6 pos"):
        ops.expert_slots(chosen(), **numbers, groups=(3, 4))
    with pytest.raises(ShapeError, match="two numbers"):
        ops.fill_slots(x, slots, **numbers, groups=(2,))
    with pytest.raises(ConfigError, match="capacity 0"):
        ops.expert_slots(chosen(), num_experts=E, capacity=0)
    with pytest.raises(ConfigError, match="num_experts is 65536, capacity 65536"):
        ops.expert_slots(chosen(), num_experts=65536, capacity=65536)
    with pytest.raises(DtypeError, match="float32"):
        ops.expert_slots(torch.zeros(B, S, K), **numbers)
    with pytest.raises(ShapeError, match=r"x is \(4, 5, 3\)"):
        ops.fill_slots(x[:, :5], slots, **numbers)
    with pytest.raises(ShapeError, match=r"weights \(4, 6, 1\)"):
        ops.take_slots(torch.zeros(E, 1, 1, 2, D), slots, torch.zeros(B, S, 1))
    with pytest.raises(ShapeError, match=r"cannot be divided into the \(3, 1\) groups"):
        ops.take_slots(torch.zeros(E, 3, 1, 2, D), slots)
    with pytest.raises(DtypeError, match="int64"):
        ops.take_slots(torch.zeros(E, 1, 1, 2, D).long(), slots)
    with pytest.raises(ShapeError, match=r"limit_capacity: .* groups \(0, 1\)"):
        ops.limit_capacity(chosen(), torch.zeros(B, S, K), **numbers, groups=(0, 1))


ORDER = torch.tensor([0, 5, 1, 2, 4, 3])


def alone(fn, groups, *operands):
    """`fn(*operands)` of each group's rows and positions; the results put together again."""
    g, h = groups
    rows = []
    for i in range(g):
        part = [x.chunk(g)[i] for x in operands]
        rows.append(torch.cat([fn(slice(j * S // h, (j + 1) * S // h), *(x.chunk(h, 1)[j] for x in part)) for j in range(h)], 1))
    return torch.cat(rows)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_capacities_of_groups_are_of_each_alone(groups):
    """A group's experts keep their heaviest slots, of equal ones the first by original index, as if there were no other group."""
    experts = chosen(4)
    weights = torch.randint(0, 3, (B, S, K), generator=torch.Generator().manual_seed(5)).double()
    kept = ops.limit_capacity(experts, weights, ORDER, num_experts=E, capacity=2, groups=groups)
    expected = alone(lambda at, e, w: ops.limit_capacity(e, w, ORDER[at], num_experts=E, capacity=2), groups, experts, weights)
    assert torch.equal(kept, expected) and (kept != experts).any() == (groups != (4, 6))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_counts_and_scales_of_groups_are_of_each_alone(groups, make_tensor):
    """Slots that name an expert; Sinkhorn's scaling."""
    experts, logits = chosen(6, -1, E + 1), make_tensor((B, S, E), F64)
    counts = ops.group_counts(experts, num_experts=E, groups=groups)
    for (i, j), tokens in places(groups):
        ids = [int(experts[b, s, k]) for b, s in tokens for k in range(K)]
        assert counts[i, j].tolist() == [ids.count(e) for e in range(E)]
    testing.assert_close(ops.sinkhorn(logits, groups=groups), alone(lambda at, x: ops.sinkhorn(x), groups, logits))


SPECS = {"sequences": P("x"), "positions": P(None, "x"), "both": P("x", "y"), "one dim": P(("x", "y"))}
FITTING = {"sequences": (2, 1), "positions": (1, 2), "both": (2, 2), "one dim": (4, 1)}


def layer(groups):
    """Everything that groups are for, in a row."""

    def fn(x, weights, experts, order):
        numbers = {"num_experts": E, "capacity": 3}
        experts = ops.limit_capacity(experts, weights, order, **numbers, groups=groups)
        slots = ops.expert_slots(experts, **numbers, groups=groups)
        rows = ops.fill_slots(x, slots, **numbers, groups=groups)
        return ops.take_slots(rows.square(), slots, weights)

    def with_gradients(x, weights, experts, order, dy):
        y, pull = torch.func.vjp(lambda x, w: fn(x, w, experts, order), x, weights)
        return y, ops.group_counts(experts, num_experts=E, groups=groups).sum((0, 1)), *pull(dy)

    return with_gradients


@pytest.mark.parametrize("fits", [True, False], ids=["fit", "do not fit"])
@pytest.mark.parametrize("spec", SPECS)
def test_whole_groups_stay_on_their_ranks(spec, fits, make_tensor):
    """On ranks all is as on one; where their shards are whole groups nothing but the counts travels."""
    groups = FITTING[spec] if fits else (1, 3)
    operands = (make_tensor((B, S, D), F64), make_tensor((B, S, K), F64), chosen(7), ORDER, make_tensor((B, S, D), F64))
    at = SPECS[spec]
    specs = (at, at, at, P(*at.dims[1:2]), at)
    lowered = jit(layer(groups), mesh=Mesh(x=2, y=2), in_specs=specs).lower(*operands)
    for got, want in zip(lowered.simulate(*operands), layer(groups)(*operands), strict=True):
        testing.assert_close(got.double(), want.double())
    kinds = [collective.op for collective in lowered.collectives()]
    assert (kinds == ["all_reduce"]) == fits


@pytest.mark.parametrize("spec", SPECS)
def test_slots_of_a_group_on_several_ranks_are_given_in_order(spec):
    """Rows of an expert are counted over the ranks that share a group."""
    fn = lambda e: ops.expert_slots(e, num_experts=E, capacity=4, groups=(1, 3))  # noqa: E731
    lowered = jit(fn, mesh=Mesh(x=2, y=2), in_specs=(SPECS[spec],)).lower(chosen(9))
    assert torch.equal(lowered.simulate(chosen(9)), fn(chosen(9)))


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_experts_of_other_axes_stay_there(weighted, make_tensor):
    """Rows of experts that lie where tokens are alike: each rank takes from its own, and the sum is all that travels."""
    slots = ops.expert_slots(chosen(8, -1, 4), num_experts=4, capacity=3, groups=(2, 1))
    rows, weights = make_tensor((4, 2, 1, 3, D), F64), make_tensor((B, S, K), F64)
    dy = make_tensor((B, S, D), F64)

    def fn(rows, slots, weights, dy):
        y, pull = torch.func.vjp(lambda r, w: ops.take_slots(r, slots, w if weighted else None), rows, weights)
        return y, *pull(dy)

    operands = (rows, slots, weights, dy)
    lowered = jit(fn, mesh=Mesh(x=2, y=2), in_specs=(P("y", "x"), P("x"), P("x"), P("x"))).lower(*operands)
    for got, want in zip(lowered.simulate(*operands), fn(*operands), strict=True):
        testing.assert_close(got, want)
    assert {collective.op for collective in lowered.collectives()} == {"all_reduce"}
    assert {collective.axes for collective in lowered.collectives()} == {("y",)}
