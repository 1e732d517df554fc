"""The check refuses control flow whose bodies do not fit each other, or what is around them."""

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from mpar import Mesh, P, jit
from mpar.errors import ShardingError
from mpar.sharding import CONTROL, check, collectives, copy_bodies, lower, simulate_graph

MESH = Mesh(dp=2, tp=2)


def summed(x_SD, w_DD):
    return scan(lambda h_D, x_D: (torch.tanh(h_D @ w_DD + x_D), h_D.sum()), torch.zeros_like(x_SD[0]), x_SD)


def halved(x_SD, w_DD):
    return while_loop(lambda x_SD: (x_SD @ w_DD).norm() > 1, lambda x_SD: (x_SD / 2,), (x_SD,))


def chosen(x_SD, w_DD):
    return torch.cond((x_SD @ w_DD).sum() > 0, lambda x: x @ w_DD, lambda x: x.sin(), (x_SD,))


def lowered(fn):
    """The rank graph of a function, and the node of its control flow."""
    x_SD, w_DD = torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)
    ranked = jit(fn, mesh=MESH, in_specs=(P("dp", "tp"), P("tp"))).lower(x_SD, w_DD).ranked
    copy_bodies(ranked.graph)
    check(ranked)
    (node,) = [node for node in ranked.graph.nodes if node.target in CONTROL.values()]
    return ranked, node


def returning(node, name, *specs):
    """Lower a body anew, so that it is right in itself, for other specs of its results."""
    flow, body = node.kwargs["flow"], node.kwargs["flow"].bodies[name]
    other = lower(body.logical, MESH, body.in_specs, [*specs, *body.out_specs[len(specs) :]])
    node.kwargs = {"flow": flow.with_bodies(**{name: other})}


def without_collectives(node, name):
    """Results of collectives that keep their shape are read before they are carried out."""
    graph = node.kwargs["flow"].bodies[name].graph
    moves = [each for each in graph.nodes if each.target is collectives.all_reduce]
    assert moves
    for move in moves:
        move.replace_all_uses_with(move.args[0])


def changed_carry(node):
    before = node.kwargs["flow"].body.out_specs[0]
    returning(node, "body", P("dp" if before != P("dp") else "tp"))


def pending_predicate(node):
    node.args[0][0].meta["spec"] = P(partial="tp")


def other_branch(node):
    returning(node, "if_true", P(None, ("dp", "tp")))


def other_test(node):
    """The test is lowered for an operand that is placed otherwise."""
    flow = node.kwargs["flow"]
    other = lower(flow.test.logical, MESH, [P(None, "dp"), *flow.test.in_specs[1:]], [P()])
    node.kwargs = {"flow": flow.with_bodies(test=other)}


def other_operand(node):
    node.args[0][-1].meta["spec"] = P(None, "dp")


WRONG = {
    "a carry leaves as it did not enter": (summed, changed_carry, "carries enter its body as"),
    "an operand is placed otherwise": (summed, other_operand, "is defined as|its operands are"),
    "a branch by a pending sum": (chosen, pending_predicate, "may take different branches"),
    "branches return other specs": (chosen, other_branch, "its branches return"),
    "a test of another operand": (halved, other_test, "ranks may disagree"),
    "a test that sums over its own rank": (halved, lambda node: without_collectives(node, "test"), "pending sum|not linear"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_control_flow_is_refused(name):
    """Each graph passes as it was lowered, and is refused after one change, with what disagrees."""
    fn, spoil, message = WRONG[name]
    ranked, node = lowered(fn)
    spoil(node)
    with pytest.raises(ShardingError, match=message):
        check(ranked)


def test_ranks_that_disagree_are_noticed():
    """In a simulation, a predicate that differs from rank to rank is an error."""
    ranked, node = lowered(chosen)
    with ranked.graph.inserting_before(node):
        start = ranked.graph.call_function(collectives.start, (), {"axes": ("tp",), "extent": 1})
        differs = ranked.graph.call_function(torch.ops.aten.full.default, ([], start))
    start.meta = differs.meta = dict(node.args[0][0].meta)
    node.args = ([differs, *node.args[0][1:]],)
    with pytest.raises(ShardingError, match="differs from rank to rank"):
        simulate_graph(ranked, [torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)])
