"""Products of one value with several parameters are joined, and only these, in code that nothing differentiates."""

import pytest
import torch

from mpar import Mesh, models, ops
from mpar.compiler import RecomputePolicy
from mpar.compiler.segment import Target, compile_function
from mpar.compiler.segment._join_products import join_products
from mpar.infer.compile import compile_decode
from mpar.kernels import Kernels
from mpar.models import CacheSizes
from mpar.runtime import ALONE, load
from mpar.spec import P
from mpar.testing import assert_close

X, W = (2, 3, 8), (8, 4)


def several(x, a, b, c):
    return ops.einsum("bsd,df->bsf", x, a), ops.einsum("bsd,df->bsf", x, b) * 2, x + 1


def of_other_values(x, a, b, c):
    return ops.einsum("bsd,df->bsf", x, a), ops.einsum("bsd,df->bsf", x + 1, b)


def of_another_kind(x, a, b, c):
    return ops.einsum("bsd,df->bsf", x, a), ops.einsum("bsd,df->fbs", x, b)


def of_computed_weights(x, a, b, c):
    return ops.einsum("bsd,df->bsf", x, a), ops.einsum("bsd,df->bsf", x, b + c)


def of_one_weight(x, a, b, c):
    return ops.einsum("bsd,df->bsf", x, a), ops.einsum("bsd,df->bsf", x, a) + 1


def compiled(fn, operands):
    def join(graph):
        return join_products(graph, graph.find_nodes(op="placeholder")[1:])

    target = Target(Mesh(tp=1), {}, RecomputePolicy("none"), Kernels("torch", None))
    return compile_function("f", fn, operands, target, [P()] * len(operands), passes=[join])


@pytest.mark.parametrize("fn", [several, of_other_values, of_another_kind, of_computed_weights, of_one_weight])
def test_what_is_joined(fn):
    operands = [torch.randn(X, dtype=torch.float64), *(torch.randn(W, dtype=torch.float64) for _ in range(3))]
    kind = compiled(fn, operands).kind
    assert kind.neighbours == ((((1, 2), 1),) if fn is several else ())
    run = load("f", kind.source, kind.constants, torch.device("cpu"))
    for result, expected in zip(run(list(operands), ALONE), fn(*operands), strict=True):
        assert_close(result, expected, name="result")


def test_queries_keys_and_values_are_one_product():
    """Of a model that goes on with rows; on ranks, those of its shards."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = models.build("llama", sizes | {"num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64})
    for mesh in (Mesh(tp=1), Mesh(tp=2)):
        kind = compile_decode(llama, mesh, "tp", CacheSizes(4, 2, 2, 4, 8, 1)).kinds["layers forward"]
        assert kind.neighbours == (((1, 2, 3), 1), ((6, 7), 1)), "queries, keys and values; gate and up"
