"""Reuse of operands on printed graphs."""

import operator
import random
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from mpar.compiler.segment._reuse import IN_PLACE, OVER_FIRST, OVER_GRADIENT, overwrite_operands, reuse_operands
from mpar.compiler.segment._write_state import write_state
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES
from mpar.sharding import lower, trace
from mpar.spec import P
from mpar.torch_private import storage_key
from tests.tiers import examples

aten = torch.ops.aten
OVERWRITE = PRIMITIVES["overwrite"].op


def targets(fn, *args):
    """Names of the ops of a function after the pass, and the pass's statistics."""
    logical = trace(fn, args)
    graph = lower(logical, Mesh(dp=1), [P()] * len(args)).graph
    statistics = reuse_operands(graph)
    return [str(n.target) for n in graph.nodes if n.op == "call_function"], statistics


X = torch.ones(4, 4)


def test_an_intermediate_that_dies_is_written_over():
    """Either operand of a sum or product may be it, of other ops only the first, such as the gradient of a result."""
    assert targets(lambda x, y: x + y.sin(), X, X)[0] == ["aten.sin.default", "aten.add_.Tensor"]
    assert targets(lambda x, y: x.sin() * y, X, X)[0] == ["aten.sin.default", "aten.mul_.Tensor"]
    assert targets(lambda x, y: x.sin() - y, X, X)[0] == ["aten.sin.default", "aten.sub_.Tensor"]
    assert targets(lambda x, y: x - y.sin(), X, X)[0] == ["aten.sin.default", "aten.sub.Tensor"]
    slope = aten.gelu_backward
    assert targets(lambda x, y: slope(x.sin(), y), X, X)[0] == ["aten.sin.default", "aten.gelu_backward.grad_input"]
    assert targets(lambda x, y: slope(x, y.sin()), X, X)[0] == ["aten.sin.default", "aten.gelu_backward.default"]


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


def test_sums_chain():
    """One storage takes up one term after another, also as a view, until something else reads it."""
    assert targets(lambda x, y: y.sin() + x + y, X, X)[0] == ["aten.sin.default", "aten.add_.Tensor", "aten.add_.Tensor"]
    assert targets(lambda x: (x.sin().view(16).view(4, 4) + x) * x, X)[1] == {"operands_reused": 2}
    assert targets(lambda x: (lambda a: (a + x) * a)(x.sin()), X)[1] == {"operands_reused": 1}  # the product over the sum
    assert targets(lambda x: (lambda a: (a.view(16), a + x))(x.sin()), X)[1] == {"operands_reused": 0}
    assert targets(lambda x: x.view(16) + 1.0, X)[1] == {"operands_reused": 0}


EINSUM_ADD = PRIMITIVES["einsum_add"].op
OTHERS = {
    aten.masked_fill.Scalar: lambda y: (y > 0, 0.5),
    aten.pow.Tensor_Scalar: lambda y: (3,),
    EINSUM_ADD: lambda y: (y[:, :5].contiguous(), y[:5]),
}
"""What follows the first operand of an op, unless it is as many tensors as the op takes; y is any of its shape."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [*IN_PLACE, *OVER_FIRST, *OVER_GRADIENT], ids=str)
def test_in_place_forms_give_equal_bits(op, dtype, make_tensor):
    """Whether sizes are round or not, and for gradients by either formula of gelu."""
    num_operands = sum(argument.type.isSubtypeOf(torch.TensorType.get()) for argument in op._schema.arguments)
    for shape in ((64, 256), (7, 33)):
        x, *tensors = (make_tensor(shape, dtype) for _ in range(num_operands))
        others = OTHERS[op](make_tensor(shape, dtype)) if op in OTHERS else tensors
        others = (*others, 0.0) if op is aten.threshold_backward.default else others
        several = {EINSUM_ADD: [{"equation": "ab,bc->ac"}]}
        for kwargs in several.get(op, [{"approximate": "none"}, {"approximate": "tanh"}] if "gelu" in str(op) else [{}]):
            expected, over = op(x, *others, **kwargs), x.clone()
            into = {"grad_input": over} if op in OVER_GRADIENT else {}
            actual = (IN_PLACE | OVER_FIRST | OVER_GRADIENT)[op](over, *others, **kwargs, **into)
            assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert actual.data_ptr() == over.data_ptr()


STEPS = {
    "add": lambda a, b: (aten.add.Tensor, (a, b)),
    "mul": lambda a, b: (aten.mul.Tensor, (a, b)),
    "add a number": lambda a, b: (aten.add.Tensor, (a, 0.5)),
    "subtract": lambda a, b: (aten.sub.Tensor, (a, b)),
    "sin": lambda a, b: (aten.sin.default, (a,)),
    "slope": lambda a, b: (aten.gelu_backward.default, (a, b)),
    "clone": lambda a, b: (aten.clone.default, (a,)),
    "flatten": lambda a, b: (aten.view.default, (a, [-1])),
    "square": lambda a, b: (aten.view.default, (a, [4, 4])),
    "transpose": lambda a, b: (aten.permute.default, (a, [*reversed(range(a.meta["val"].ndim))])),
    "part": lambda a, b: (aten.slice.Tensor, (a, 0, 0, 2)),
    "halves": lambda a, b: (aten.split.Tensor, (a, max(1, a.meta["val"].shape[0] // 2))),
    "sum": lambda a, b: (aten.sum.dim_IntList, (a, [0], True)),
}


def added(graph, target, args):
    """The nodes of the results of one more op of a graph; none if the operands do not fit it. Gradients are never broadcast."""
    operands = fx.node.map_arg(args, lambda n: n.meta["val"])
    try:
        value = target(*operands)
    except RuntimeError:
        return []
    if target in OVER_GRADIENT and operands[0].shape != operands[1].shape:
        return []
    node = graph.call_function(target, args)
    node.meta["val"] = value
    if isinstance(value, Tensor):
        return [node]
    items = [graph.call_function(operator.getitem, (node, i)) for i in range(len(value))]
    for item, part in zip(items, value, strict=True):
        item.meta["val"] = part
    return items


def random_graph(rng):
    """A graph of ops on two operands and a constant, mostly on values made just before. A few values are its results, repeated
    and overlapping ones too."""
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("constant")]
    for node in values:
        node.meta["val"] = torch.empty(4, 4, device="meta")
    for _ in range(rng.randint(2, 12)):
        step = STEPS[rng.choice([*STEPS, "add", "mul", "square", "square"])]
        values += added(graph, *step(*(values[-min(len(values), 1 + int(rng.expovariate(0.6)))] for _ in range(2))))
    graph.output(tuple(rng.choice(values[-5:]) for _ in range(rng.randint(1, 4))))
    graph.eliminate_dead_code()
    return graph


def simulated():
    """The operands and the constant of a graph, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=generator) for name in ("x", "y", "constant")}


def run(graph):
    """What each node of a graph gives for simulated data; all values stay alive."""
    data, found = simulated(), {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
        found[node] = (
            node.target(*args, **kwargs) if node.op == "call_function" else data[node.target] if node.op != "output" else args[0]
        )
    return found


def keep_state(graph):
    """Write the first result over the first operand, if it can be its new state."""
    result = graph.output_node().args[0][0].meta["val"]
    if result.shape == (4, 4):
        write_state(graph, slice(0, 1), slice(0, 1))


@settings(max_examples=examples(3000), deadline=None)
@given(seed=st.integers(0, 2**32), before=st.sampled_from([None, overwrite_operands, keep_state]))
def test_random_graphs_keep_their_bits(seed, before):
    """Results have equal bits, constants stay, and so do operands over which no earlier pass writes. Values share a storage where
    their values without data do, and only there."""
    graph = random_graph(random.Random(seed))
    expected = run(graph)[graph.output_node()]
    if before is not None:
        before(graph)
    reuse_operands(graph)
    found = run(graph)
    assert all(map(torch.equal, found.pop(graph.output_node()), expected))
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "placeholder" and before is None):
            assert torch.equal(found[node], simulated()[node.target])
    values = [node for node in found if isinstance(found[node], Tensor) and node.target is not OVERWRITE]
    for one, other in combinations(values, 2):
        shared = storage_key(one.meta["val"]) == storage_key(other.meta["val"])
        assert shared == (storage_key(found[one]) == storage_key(found[other]))
