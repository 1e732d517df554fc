"""Reuse of operands on printed graphs."""

import torch

from mpar.compiler.segment._reuse import reuse_operands
from mpar.mesh import Mesh
from mpar.sharding import lower, trace
from mpar.spec import P


def targets(fn, *args):
    """Names of the ops of a function after the pass, and the pass's statistics."""
    logical = trace(fn, args)
    graph = lower(logical, Mesh(dp=1), [P()] * len(args)).graph
    statistics = reuse_operands(graph)
    return [str(n.target) for n in graph.nodes if n.op == "call_function"], statistics


X = torch.ones(4, 4)


def test_an_intermediate_that_dies_is_written_over():
    """Either operand of a sum or product may be it."""
    assert targets(lambda x, y: x + y.sin(), X, X)[0] == ["aten.sin.default", "aten.add_.Tensor"]
    assert targets(lambda x, y: x.sin() * y, X, X)[0] == ["aten.sin.default", "aten.mul_.Tensor"]


def test_what_is_read_again_is_not():
    """Not an input, not a value with another reader, not a result of the function."""
    assert targets(lambda x, y: x + y, X, X)[1] == {"operands_reused": 0}
    assert targets(lambda x: (x.sin() + x, x.sin().cos()), X)[1] == {"operands_reused": 0}
    assert targets(lambda x: (lambda a: (a, a + x))(x.sin()), X)[1] == {"operands_reused": 0}


def test_views_and_broadcasts_are_not():
    """A view's storage is another's; an operand that is smaller than the result cannot hold it."""
    assert targets(lambda x: x.t() + x, X)[1] == {"operands_reused": 0}
    assert targets(lambda x: x.sin().t() + 1 * x, X)[1]["operands_reused"] <= 1
    assert targets(lambda x: x.sum(0, keepdim=True) + x, X)[1] == {"operands_reused": 0}
    assert targets(lambda x: (lambda a: a + a)(x.sin()), X)[1] == {"operands_reused": 0}


def test_dtypes_are_kept():
    """A narrower operand cannot hold a wider sum."""
    assert targets(lambda x, y: x.sin() + y, X, X.double())[1] == {"operands_reused": 0}
