"""What `jit` says: errors with their lines, where collectives come from, where results live."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, models, ops, value_and_grad
from mpar.errors import ShardingError, TraceError
from mpar.strategy import preset

MESH = Mesh(dp=2, tp=4)
X = torch.zeros(8, 12, dtype=torch.float64)
HERE = r"sharding/test_jit.py:\d+"


def branch(x):
    return x if x.sum() > 0 else -x


IMPURE = {
    "of an operand": (lambda x: x.mul_(2), [f"mul_ at {HERE} writes into argument 0: write into a copy"]),
    "random": (
        lambda x: F.dropout(x) + torch.rand(8, 12) + torch.randn_like(x) + torch.normal(x, 1.0),
        [f"aten.rand.default at {HERE}.*mpar.ops.random_uniform", "randn_like.*ops.random_normal", "aten.normal", "bernoulli"],
    ),
    "masked": (lambda x: x[x > 0], [f"nonzero.* at {HERE} has a shape that depends on data", "torch.where"]),
    "unique": (lambda x: torch.unique(x), [f"unique.* at {HERE} has a shape that depends on data"]),
    "branch": (branch, [f"at {HERE} makes a Python value"]),
    "item": (lambda x: x * x.sum().item(), [f"at {HERE} makes a Python value"]),
    "strides": (lambda x: x.as_strided((2, 2), (1, 1)), [f"as_strided.* at {HERE} reads memory by strides"]),
    "text": (lambda x: (x, "loss"), [r"it returns \['str'\]"]),
}


@pytest.mark.parametrize("name", IMPURE)
def test_impure_function_is_refused(name):
    """With every offender, its line, and what to use instead."""
    fn, patterns = IMPURE[name]
    with pytest.raises(TraceError) as caught:
        jit(fn, mesh=MESH).lower(X)
    for pattern in patterns:
        assert caught.match(pattern)


def test_gradients_of_torch_may_write_inside():
    """What torch's own gradients write into fresh tensors is no mutation of the user's."""
    fn = lambda x: torch.func.grad(lambda x: x.prod(0).sum())(x)  # noqa: E731
    x = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = jit(fn, mesh=Mesh(a=2), in_specs=P("a")).lower(x).simulate(x)
    torch.testing.assert_close(actual, x.prod(0) / x, rtol=1e-12, atol=0)


def test_arguments_that_are_no_tensors_are_refused():
    """With the path of each."""
    with pytest.raises(TraceError, match=r"\['0.scale', '1'\] are not tensors, or are sparse"):
        jit(lambda config, n: n, mesh=MESH).lower({"x": X, "scale": 2.0}, 3)


def test_all_specs_that_do_not_fit_are_listed():
    """Sizes that do not divide, unknown axes, too many dims, axes in a wrong order; of arguments and results, in one message."""
    fn = lambda a, b, c, d: (a, b)  # noqa: E731
    in_specs = (P("dp", "tp"), P("pp"), P(None, None, "dp"), P(("tp", "dp")))
    args = (torch.zeros(3, 6), X, X, X)
    with pytest.raises(ShardingError) as caught:
        jit(fn, mesh=MESH, in_specs=in_specs, out_specs=(None, P(None, ("dp", "tp")))).lower(*args)
    for pattern in (
        r"0 \(3, 6\).*dim 0 has size 3, which dp=2 does not divide",
        r"0 \(3, 6\).*dim 1 has size 6, which tp=4 does not divide",
        r"1 \(8, 12\).*has no axis \['pp'\]",
        r"2 \(8, 12\).*the spec has 3 dims, the tensor has 2",
        r"3 \(8, 12\).*must name its axes in mesh order, \('dp', 'tp'\)",
        r"result 1 \(8, 12\).*dim 1 has size 12, which dp=2 x tp=4 does not divide",
        r"mesh: Mesh\(dp=2, tp=4\)",
    ):
        assert caught.match(r"(?s).*" + pattern)


def test_a_pending_result_that_is_none_is_refused():
    """A result can be left a pending sum only where it is one."""
    with pytest.raises(ShardingError, match=r"result 0.*is not a pending sum over \['tp'\]"):
        jit(lambda x: x * 2, mesh=MESH, out_specs=P(partial="tp")).lower(X)


def test_a_pending_result_may_stay():
    """A result that is a pending sum is left so where its spec says it."""
    lowered = jit(lambda x: x.sum(0), mesh=MESH, in_specs=P("tp"), out_specs=P(partial="tp")).lower(X)
    assert lowered.collectives() == []
    assert lowered.out_specs == P(partial="tp")


def test_a_tree_of_specs_that_does_not_match_is_refused():
    """With the place and what stands there."""
    with pytest.raises(ShardingError, match=r"in_specs.0: .*where the value has \['w', 'x'\]"):
        jit(lambda p: p["x"], mesh=MESH, in_specs=({"x": P()},)).lower({"x": X, "w": X})


def test_a_constraint_that_does_not_fit_is_refused():
    """With the line of the constraint."""
    with pytest.raises(ShardingError, match=rf"cannot place a value at {HERE}(?s:.*)dim 0 has size 3, which tp=4"):
        jit(lambda x: ops.constrain(x[:3], P("tp")), mesh=MESH).lower(X)


def test_collectives_name_the_line():
    """Each collective tells op, axes, bytes of a rank, and the user's line; of a gradient the line of the forward op."""

    def loss(w, x):
        h = (x @ w).tanh()
        return h.sum()

    first = loss.__code__.co_firstlineno
    lowered = jit(value_and_grad(loss), mesh=MESH, in_specs=(P("tp"), P("dp", "tp")), out_specs=(P(), P("tp"))).lower(
        torch.zeros(12, 4, dtype=torch.float64), X
    )
    found = {(c.op, c.axes, c.bytes, c.line.rpartition(":")[2]) for c in lowered.collectives()}
    assert found == {
        ("all_reduce", ("tp",), 4 * 4 * 8, str(first + 1)),
        ("all_reduce", ("dp",), 8, str(first + 2)),
        ("all_reduce", ("dp",), 3 * 4 * 8, str(first + 1)),
    }
    assert str(lowered.collectives()[0]).split() == ["all_reduce", "tp", "128", "B", f"sharding/test_jit.py:{first + 1}"]


def test_models_lines_are_the_models():
    """Collectives of a model's loss and gradients come from lines of the model, none from nowhere."""
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 60, "max_position_embeddings": 64,
    }  # fmt: skip
    model, strategy = models.from_config(config, vocab_multiple=4), preset("tp_sp")
    batch = {key: torch.empty(8, 4, dtype=torch.int64, device="meta") for key in ("tokens", "labels")}
    fn = lambda params, batch: value_and_grad(lambda p: model.loss(p, batch)[0])(params)  # noqa: E731
    lowered = jit(fn, mesh=MESH, in_specs=(None, P("dp")), table=strategy.compute).lower(model.abstract_params, batch)
    lines = [c.line for c in lowered.collectives()]
    assert len(lines) > 10
    files = {f"{path.parent.name}/{path.name}" for path in Path(models.__file__).parent.rglob("_*.py")}
    assert {line.partition(":")[0] for line in lines} <= files


def test_results_live_where_they_come():
    """Without out_specs a result stays where its op leaves it, sums carried out; the printed graph shows it."""
    lowered = jit(lambda x: {"y": x * 2, "s": x.sum(0)}, mesh=MESH, in_specs=P("dp", "tp")).lower(X)
    assert lowered.out_specs == {"y": P("dp", "tp"), "s": P("tp")}
    assert "%all_reduce: float64[3] P('tp') = all_reduce(" in str(lowered)
