"""The independent type check refuses rank graphs that are wrong in one place, and names the place."""

import dataclasses
import operator
import re

import pytest
import torch
from torch import fx

from mpar import Mesh, P, jit, models, ops, tree, value_and_grad
from mpar.errors import ShardingError
from mpar.sharding import check, collectives
from mpar.strategy import preset

aten = torch.ops.aten
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=[None, 8], ids=["logits", "chunked"])
def ranked(request):
    """The rank graph of a small Llama's loss and gradients: data, fully sharded, tensor and sequence parallel."""
    mesh, strategy = Mesh(dp=2, fsdp=2, tp=2), preset("zero3_tp_sp")
    model = models.from_config(CONFIG, dtype=torch.float64, vocab_multiple=4, logits_chunk=request.param)
    batch = {key: torch.empty(8, 4, dtype=torch.int64, device="meta") for key in ("tokens", "labels")}
    is_axes = lambda a: isinstance(a, tuple) and all(name is None or isinstance(name, str) for name in a)  # noqa: E731
    stored = tree.map_leaves(lambda a: strategy.storage_spec(a, "param", mesh), model.param_axes, is_leaf=is_axes)

    def step(params, batch):
        return value_and_grad(lambda p: model.loss(p, batch)[0])(params)

    compiled = jit(step, mesh=mesh, in_specs=(stored, P(("dp", "fsdp"))), out_specs=(P(), stored), table=strategy.compute).lower(
        model.abstract_params, batch
    )
    return compiled.ranked


def copy(ranked):
    """`ranked` with a graph of its own, and the new node of each old one."""
    graph, nodes = fx.Graph(), {}
    for node in ranked.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    return dataclasses.replace(ranked, graph=graph), nodes


def refused(ranked, *names):
    """Whether `check` raises, and its message, which must name a node of the graph."""
    try:
        check(ranked)
    except ShardingError as error:
        (name,) = re.findall(r"rank graph: %(\w+)", str(error))
        assert name in {node.name for node in ranked.graph.nodes}
        return True
    return False


def kinds(ranked, *targets):
    return [node for node in ranked.graph.nodes if node.target in targets]


MOVES = (*collectives.COLLECTIVES, collectives.shard)


def test_accepts_what_the_compiler_makes(ranked):
    """The graph that the mutations below start from is well-typed, and has every kind of node that they change."""
    check(ranked)
    for kind in (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce, collectives.start):
        assert kinds(ranked, kind), kind


def test_refuses_a_dropped_collective(ranked):
    """Whichever collective or narrowing is left out, its operand read instead."""
    for node in kinds(ranked, *MOVES):
        wrong, new = copy(ranked)
        new[node].replace_all_uses_with(new[node].args[0])
        assert refused(wrong), node.format_node()


def test_refuses_another_axis(ranked):
    """Whichever collective works over another mesh axis of the same size."""
    for node in kinds(ranked, *MOVES):
        wrong, new = copy(ranked)
        (*_, axis) = node.kwargs["axes"]
        other = {"dp": "tp", "fsdp": "tp", "tp": "dp"}[axis]
        new[node].kwargs = {**node.kwargs, "axes": (other,), "size": 2}
        assert refused(wrong), node.format_node()


def test_refuses_a_swapped_order():
    """A gather of the major axis while the minor one stays gives another order of rows than it says."""
    mesh = Mesh(a=2, b=2)
    lowered = jit(lambda x: x, mesh=mesh, in_specs=(P(("a", "b")),), out_specs=P("a")).lower(torch.zeros(8))
    (gather,) = kinds(lowered.ranked, collectives.all_gather)
    gather.kwargs = {**gather.kwargs, "axes": ("a",)}
    gather.meta["spec"] = P("b")
    wrong = dataclasses.replace(lowered.ranked, out_specs=(P("b"),))
    with pytest.raises(ShardingError, match="order of shards"):
        check(wrong)


def test_refuses_a_merge_of_a_minor_dim():
    """Flattening (whole, sharded) dims does not give a sharded dim: the parts of a rank are not neighbours."""
    mesh = Mesh(a=2)
    lowered = jit(lambda x: x.reshape(8), mesh=mesh, in_specs=(P(),), out_specs=P("a")).lower(torch.zeros(2, 4))
    graph = lowered.ranked.graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    (reshape,) = kinds(lowered.ranked, aten.reshape.default)
    (shard,) = kinds(lowered.ranked, collectives.shard)
    shard.replace_all_uses_with(reshape)
    graph.erase_node(shard)
    reshape.args = (placeholder, [4])
    reshape.meta |= {"val": torch.empty(4, device="meta"), "spec": P("a")}
    placeholder.meta |= {"val": torch.empty(2, 2, device="meta"), "spec": P(None, "a")}
    with pytest.raises(ShardingError, match="%reshape"):
        check(dataclasses.replace(lowered.ranked, in_specs=(P(None, "a"),)))


def test_refuses_a_double_count(ranked):
    """Every sum over ranks carried out twice."""
    for node in kinds(ranked, collectives.all_reduce, collectives.reduce_scatter):
        wrong, new = copy(ranked)
        target = new[node]
        with wrong.graph.inserting_after(target):
            again = wrong.graph.call_function(
                collectives.all_reduce, (target,), {"axes": node.kwargs["axes"], "size": node.kwargs["size"], "op": "sum"}
            )
        again.meta = dict(target.meta)
        target.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)
        assert refused(wrong), node.format_node()


def test_refuses_a_nonlinear_op_on_a_pending_sum(ranked):
    """The hyperbolic tangent of any value that is pending."""
    pending = [n for n in ranked.graph.nodes if n.meta.get("spec") is not None and n.meta["spec"].partial]
    assert pending
    for node in pending:
        wrong, new = copy(ranked)
        with wrong.graph.inserting_after(new[node]):
            bent = wrong.graph.call_function(aten.tanh.default, (new[node],))
        bent.meta = dict(node.meta)
        new[node].replace_all_uses_with(bent, delete_user_cb=lambda user, bent=bent: user is not bent)
        assert refused(wrong), node.format_node()


def test_refuses_a_product_of_pending_sums():
    """A pending sum times itself, under one name or under two."""
    mesh = Mesh(a=2)
    lowered = jit(lambda x: x * 2.0, mesh=mesh, in_specs=(P(partial="a"),), out_specs=None).lower(torch.zeros(4))
    ranked, _ = copy(lowered.ranked)
    (product,) = (node for node in ranked.graph.nodes if node.target == aten.mul.Tensor)
    product.args = (product.args[0], product.args[0])
    with pytest.raises(ShardingError, match="not linear"):
        check(ranked)


def test_refuses_adding_a_whole_to_a_pending_sum():
    """Each rank would add it: the sum over ranks counts it several times."""
    mesh = Mesh(a=2)
    lowered = jit(lambda x, y: x + y, mesh=mesh, in_specs=(P(partial="a"), P(partial="a")), out_specs=None).lower(
        torch.zeros(4), torch.zeros(4)
    )
    _, second = lowered.ranked.graph.find_nodes(op="placeholder")
    second.meta["spec"] = P()
    with pytest.raises(ShardingError, match="not linear"):
        check(dataclasses.replace(lowered.ranked, in_specs=(P(partial="a"), P())))


def test_refuses_a_part_that_is_not_told_its_place(ranked):
    """Vocabulary-parallel ops that all ranks start at row 0, or at the row of another axis."""
    for node in kinds(ranked, collectives.start):
        for user in node.users:
            wrong, new = copy(ranked)
            new[user].kwargs = {**new[user].kwargs, "start": 0}
            assert refused(wrong), user.format_node()
        wrong, new = copy(ranked)
        new[node].kwargs = {**node.kwargs, "axes": ("dp",)}
        assert refused(wrong), node.format_node()


def test_refuses_a_gradient_that_is_not_reduced(ranked):
    """A result that ranks compute from different rows, returned as if they were the same."""
    for index, spec in enumerate(ranked.out_specs):
        wrong, new = copy(ranked)
        node = ranked.graph.output_node().args[0][index]
        while node.target in MOVES:
            node = node.args[0]
        if node.meta.get("spec") in (None, spec) or node.target is operator.getitem:
            continue
        output = wrong.graph.output_node()
        output.args = (tuple(new[node] if i == index else n for i, n in enumerate(output.args[0])),)
        assert refused(wrong), index


def test_message_says_line_and_mesh_axis():
    """The error names node, source line, axis and both types."""
    mesh = Mesh(a=2)
    x = torch.zeros(4, 4, dtype=torch.float64)
    lowered = jit(lambda x, w: ops.einsum("ab,bc->ac", x, w).tanh(), mesh=mesh, in_specs=(P(None, "a"), P("a"))).lower(x, x)
    (reduce,) = kinds(lowered.ranked, collectives.all_reduce)
    reduce.replace_all_uses_with(reduce.args[0])
    with pytest.raises(ShardingError, match=r"%tanh\w* \(sharding/test_check.py:\d+\).*mesh axis 'a' reads pending sums"):
        check(lowered.ranked)
