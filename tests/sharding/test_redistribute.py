"""Redistribution: the planned collectives take any placement to any other, and a constraint's cotangent goes to the dual."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpar import Mesh, P, jit, ops, value_and_grad
from mpar.collectives import combine
from mpar.sharding import check, collectives, lower, simulate_graph, trace
from mpar.sharding._bucket import bucket
from mpar.sharding._redistribute import plan, plan_bytes
from mpar.shards import assemble
from mpar.spec import normalise
from tests.sharding.expressions import MESHES, expressions, specs
from tests.sharding.test_random_functions import compile_, numbers, split
from tests.tiers import examples

THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
MESH = Mesh(a=2, b=2)


def carry_out(step, columns, mesh):
    """One step of a plan on all ranks' values."""
    out = [None] * mesh.size
    for group in mesh.groups(step.axes):
        parts = [columns[rank] for rank in group]
        if step.kind == "shard":
            results = [part.chunk(len(group), step.dim)[i] for i, part in enumerate(parts)]
        else:
            how = {
                "all_gather": {"dim": step.dim},
                "reduce_scatter": {"dim": step.dim},
                "all_reduce": {"op": "sum"},
                "all_to_all": {"src": step.dim, "dst": step.dst},
            }
            results = combine(step.kind, parts, **how[step.kind])
        for rank, result in zip(group, results, strict=True):
            out[rank] = result
    return out


@settings(THOROUGH, max_examples=examples(300))
@given(st.data())
def test_plan_gives_the_target(data):
    """Whatever the two specs, the steps give every rank its part of the target; a pending sum may stay or be carried out."""
    mesh = Mesh(**dict(zip("abc", data.draw(st.sampled_from(MESHES)), strict=False)))
    shape = data.draw(st.lists(st.sampled_from([2, 4, 6, 8, 12, 24]), min_size=1, max_size=3))
    source = normalise(data.draw(specs(shape, mesh)), mesh)
    kept = tuple(axis for axis in source.partial if data.draw(st.booleans()))
    free = Mesh(**{axis: 1 if axis in kept else size for axis, size in mesh.sizes.items()})
    target = normalise(P(*data.draw(specs(shape, free, pending=False)).dims), free)
    target = P(*target.dims, partial=kept)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, shape, generator=generator).double()
    columns = split(x, source, mesh, generator)
    for step in plan(source, target, len(shape), mesh):
        columns = carry_out(step, columns, mesh)
    torch.testing.assert_close(assemble(columns, target, mesh), x, rtol=0, atol=1e-12)


def test_plan_is_short():
    """A placement is its own plan; a pending sum that is sharded afterwards is scattered, not summed and then cut."""
    assert plan(P("a"), P("a"), 2, MESH) == []
    kinds = lambda *specs: [step.kind for step in plan(*specs, 2, MESH)]  # noqa: E731
    assert kinds(P(partial="a"), P("a")) == ["reduce_scatter"]
    assert kinds(P(partial=("a", "b")), P("a")) == ["reduce_scatter", "all_reduce"]
    assert kinds(P(), P("a", "b")) == ["shard", "shard"]
    assert kinds(P("a"), P(None, "a")) == ["all_to_all"]
    assert kinds(P(("a", "b")), P()) == ["all_gather"]


def test_dims_exchange_axes_one_by_one():
    """Two dims that give their axes to one, and back: an exchange for each axis; only what no dim wants is gathered."""

    def steps(*specs):
        return [(step.kind, step.axes, step.dim, step.dst) for step in plan(*specs, 3, MESH)]

    apart, together = P(None, "a", "b"), P(("a", "b"))
    assert steps(apart, together) == [("all_to_all", ("a",), 1, 0), ("all_to_all", ("b",), 2, 0)]
    assert steps(together, apart) == [("all_to_all", ("b",), 0, 2), ("all_to_all", ("a",), 0, 1)]
    assert steps(together, P(None, ("a", "b"))) == [("all_to_all", ("a", "b"), 0, 1)]
    assert steps(together, P(None, "a")) == [("all_gather", ("b",), 0, 0), ("all_to_all", ("a",), 0, 1)]
    assert steps(together, P(None, "b")) == [("all_to_all", ("b",), 0, 1), ("all_gather", ("a",), 0, 0)]


def test_plan_bytes_count_what_a_rank_receives():
    """All gathers and exchanges move all but the own part, once; a sum by rings moves it twice."""

    def count(source, target):
        return plan_bytes(plan(source, target, 2, Mesh(a=4)), 800, Mesh(a=4))

    assert count(P("a"), P()) == 600
    assert count(P(partial="a"), P("a")) == 600
    assert count(P(partial="a"), P()) == 1200
    assert count(P("a"), P(None, "a")) == 150
    assert count(P(), P("a")) == 0


@pytest.mark.parametrize(
    ("source", "target", "cotangent", "result", "moves"),
    [
        (P("a"), P(), P(partial="a"), P("a"), ["reduce_scatter"]),
        (P(partial="a"), P("a"), P("a"), P(), ["all_gather"]),
        (P(partial="a"), P(), P(), P(), []),
        (P(), P("a"), P("a"), P("a"), []),
        (P("a"), P(None, "a"), P(None, "a"), P("a"), ["all_to_all"]),
    ],
    ids=["gathered", "scattered", "summed", "cut", "exchanged"],
)
def test_cotangent_of_a_constraint_goes_to_the_dual(source, target, cotangent, result, moves):
    """To where the operand was: sharded where it was sharded, whole where it was pending, as it comes where it was whole."""
    x = torch.zeros(4, 4, dtype=torch.float64)

    def fn(x, dy):
        return torch.func.vjp(lambda x: ops.constrain(x, target), x)[1](dy)[0]

    lowered = jit(fn, mesh=Mesh(a=2), in_specs=(source, cotangent)).lower(x, x)
    assert lowered.out_specs == result
    assert [c.op for c in lowered.collectives()] == moves


@pytest.mark.parametrize(
    ("source", "axes", "target", "moves"),
    [
        (P("a", partial="b"), (..., ...), P("a", partial="b"), []),
        (P("a", partial="b"), ("rows", ...), P("a", partial="b"), []),
        (P("a", partial="b"), (..., "rows"), P(None, "a", partial="b"), ["all_to_all"]),
        (P("a", partial="b"), (..., "columns"), P("a", "b"), ["reduce_scatter"]),
        (P(("b", "a")), (..., "columns"), P(None, "b"), ["all_gather", "all_to_all"]),
        (P(("a", "b")), (..., "columns"), P("a", "b"), ["all_to_all"]),
        (P("a", partial="b"), (..., None), P("a", partial="b"), []),
    ],
    ids=str,
)
def test_a_constraint_leaves_what_it_does_not_name(source, axes, target, moves):
    """A dim of `...` keeps its axes but for those that others ask for, and what is minor to them; pending sums stay pending."""
    x = torch.zeros(4, 4, dtype=torch.float64)
    table = {"rows": ("a",), "columns": ("b",)}
    logical = trace(lambda x: ops.constrain(x, axes), (x,))
    ranked = lower(logical, MESH if source.dim(0) != ("b", "a") else Mesh(b=2, a=2), (source,), table=table)
    assert ranked.out_specs == (target,)
    assert [node.target.__name__ for node in ranked.graph.nodes if node.target in collectives.COLLECTIVES] == moves


def test_an_op_of_its_result_alone_comes_where_it_is_placed():
    """Slots of experts that a mark shards are filled sharded, not whole and then cut."""
    slots = torch.zeros(2, 3, 1, dtype=torch.int32)
    fill = lambda x: ops.constrain(ops.fill_slots(x, slots, num_experts=4, capacity=2), P("a"))  # noqa: E731
    ranked = jit(fill, mesh=MESH).lower(torch.zeros(2, 3, 5)).ranked
    (filled,) = [node for node in ranked.graph.nodes if "fill_slots" in str(node.target)]
    assert filled.meta["val"].shape[0] == 2


@settings(THOROUGH, max_examples=examples(40))
@given(st.data())
def test_buckets_keep_every_value(data):
    """Joined collectives give, bit for bit, what they gave alone."""
    mesh = MESH
    fns = [data.draw(expressions(mesh, max_steps=3)) for _ in range(3)]
    args = [numbers(fn.shapes) for fn in fns]
    fn = lambda *args: [fn(*own) for fn, own in zip(fns, args, strict=True)]  # noqa: E731
    flat = [x for own in args for x in own]
    counts = [len(own) for own in args]

    def of_flat(*leaves):
        parts, rest = [], list(leaves)
        for count in counts:
            parts.append(rest[:count])
            rest = rest[count:]
        return [y for ys in fn(*parts) for y in ys]

    ranked = compile_(of_flat, flat, data.draw, mesh, of_flat(*flat)).ranked
    before = simulate_graph(ranked, flat)
    if bucket(ranked.graph)["collectives_joined"] == 0:
        return
    ranked.graph.lint()
    for old, new in zip(before, simulate_joined(ranked, flat), strict=True):
        assert torch.equal(old, new)


def simulate_joined(ranked, args):
    """Run a graph with joined collectives: unjoin them again, in the order in which the bucket pass put them."""
    joinable = (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce)
    for node in list(ranked.graph.nodes):
        if node.target in joinable and isinstance(node.args[0], (list, tuple)):
            for user in list(node.users):
                index = user.args[1]
                dims = {"dim": node.kwargs["dim"][index]} if "dim" in node.kwargs else {}
                with ranked.graph.inserting_before(user):
                    alone = ranked.graph.call_function(node.target, (node.args[0][index],), {**node.kwargs, **dims})
                alone.meta = dict(user.meta)
                user.replace_all_uses_with(alone)
                ranked.graph.erase_node(user)
            ranked.graph.erase_node(node)
    check(ranked)
    return simulate_graph(ranked, args)


def test_bucket_joins_what_is_ready_together():
    """Two gathers over one group become one message; one that needs the other's result does not join."""
    x = torch.zeros(4, 4)
    lowered = jit(lambda x, y, z: (x, y, (x @ y) @ z), mesh=MESH, in_specs=(P("a"), P("a"), P("b")), out_specs=P()).lower(x, x, x)
    before = [c.op for c in lowered.collectives()]
    assert before.count("all_gather") == 3
    assert bucket(lowered.ranked.graph)["collectives_joined"] == 1
    joined = [n for n in lowered.ranked.graph.nodes if n.target is collectives.all_gather]
    assert [len(n.args[0]) if isinstance(n.args[0], list) else 1 for n in joined] == [2, 1]


def test_gradients_of_one_value_share_a_reduction():
    """The three input gradients of q, k and v are added while pending: one reduction, not three."""
    x, w = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)

    def loss(x, q, k, v):
        return sum(((x @ w).sin().sum() for w in (q, k, v)), torch.zeros((), dtype=x.dtype))

    lowered = jit(
        lambda *args: value_and_grad(loss)(*args), mesh=Mesh(a=2), in_specs=(P(), *[P(None, "a")] * 3), out_specs=(None, P())
    ).lower(x, w, w, w)
    assert [c.op for c in lowered.collectives() if c.bytes > 8] == ["all_reduce"]
