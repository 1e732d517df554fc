"""Sums of products are joined with the last of them, if nothing else reads their terms and no message is under way."""

import torch

from mpar import Mesh, ops
from mpar.compiler.segment._add_products import add_products
from mpar.compiler.segment._partition import names_of
from mpar.compiler.segment._reuse import reuse_operands
from mpar.ops import PRIMITIVES
from mpar.sharding import lower, trace
from mpar.spec import P

EQUATION = "bsd,df->bsf"
ADD, ADD_OVER = PRIMITIVES["einsum_add"].op, PRIMITIVES["einsum_add_over"].op
X, W = torch.empty(2, 4, 8), torch.empty(8, 4)


def product(x, w):
    return ops.einsum(EQUATION, x, w)


def compiled(fn, mesh=None, x=None, w=None):
    """The rank graph of `fn(x, v, w)` after the pass."""
    logical = trace(fn, (X, W, W))
    graph = lower(logical, mesh or Mesh(dp=1), [x or P(), w or P(), w or P()]).graph
    add_products(graph)
    return graph


def joined(*args, **kwargs):
    return sum(node.target == ADD for node in compiled(*args, **kwargs).nodes)


def test_sums_of_products():
    """In either order, one after the other, and of a product with what was computed before it."""
    assert joined(lambda x, v, w: product(x, v) + product(x, w)) == 1
    assert joined(lambda x, v, w: (lambda first: product(x, w) + first)(product(x, v))) == 1
    assert joined(lambda x, v, w: product(x, v) + product(x, w) + product(x.sin(), v)) == 2
    assert joined(lambda x, v, w: x[..., :4].sin() + product(x, w)) == 1


def test_products_that_stay():
    """Those whose sum or terms others read, and those that come before what they are added to."""
    assert joined(lambda x, v, w: (lambda a: (a + product(x, w), a))(product(x, v))) == 0
    assert joined(lambda x, v, w: (lambda b: (product(x, v) + b, b))(product(x, w))) == 0
    assert joined(lambda x, v, w: (lambda a: a + a)(product(x, v))) == 0
    assert joined(lambda x, v, w: (lambda a: x[..., :4].sin() + a)(product(x, v))) == 0
    assert joined(lambda x, v, w: x[..., :4] + product(x, w)) == 0  # the term is an operand of the graph
    assert joined(lambda x, v, w: 2 * product(x, v) + product(x, w).float().sin()) == 0


def test_a_product_hides_a_message():
    """A term that waits for a collective is not added to, but by a product behind another one; pending sums are, before they are
    reduced."""
    mesh, sharded = Mesh(tp=2), P(None, None, "tp")

    def lowered(fn, *shapes):
        graph = lower(trace(fn, tuple(shapes)), mesh, [sharded, P("tp"), *[P()] * (len(shapes) - 2)]).graph
        add_products(graph)
        return [node.target for node in graph.nodes if node.op == "call_function"]

    def reduced(x, v, z, w):
        return ops.constrain(product(x, v), P()) + product(z, w)

    def reduced_and_read(x, v, z, w, u):
        return ops.einsum(EQUATION, ops.constrain(product(x, v), P()), u) + product(z, w)

    def both_pending(x, v, w):
        return product(x, v) + product(x, w)

    assert ADD not in (targets := lowered(reduced, X, W, X, W)) and targets.count(PRIMITIVES["einsum"].op) == 2
    assert lowered(reduced_and_read, X, W, X, W, torch.empty(4, 4)).count(ADD) == 1
    assert joined(both_pending, mesh, x=sharded, w=P("tp")) == 1


def test_it_is_written_over_the_other_term():
    graph = compiled(lambda x, v, w: product(x, v) + product(x, w))
    assert reuse_operands(graph) == {"operands_reused": 1}
    (node,) = [node for node in graph.nodes if node.target == ADD_OVER]
    assert node.args[0].target == PRIMITIVES["einsum"].op


def test_recompute_policies_know_it():
    """It is a product, and no element-wise op."""
    (node,) = [node for node in compiled(lambda x, v, w: product(x, v) + product(x, w)).nodes if node.target == ADD]
    assert names_of(node) == {"einsum", "einsum_add"}
