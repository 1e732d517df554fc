"""Ops of torch are right on shards; those that work across a sharded dim are computed whole, with one warning."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, ops, testing, value_and_grad
from mpar.sharding import ReplicatedFallback
from mpar.tree import struct

MESH = Mesh(a=2, b=2)
FUNCTIONS = {
    "addmm with factors": lambda x, w: torch.addmm(x[:, :8], x, w, beta=2, alpha=3),
    "argsort": lambda x, w: x.argsort(-1).double() + x,
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "bmm": lambda x, w: torch.bmm(x.view(4, 2, 8), x.view(4, 8, 2)),
    "conv1d": lambda x, w: F.conv1d(x[None], w.view(8, 8, 1)),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, w[:1], dim=-1),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(8) % 8),
    "cumsum": lambda x, w: x.cumsum(0) + w.cumsum(1),
    "cummax": lambda x, w: x.cummax(0).values,
    "diagonal": lambda x, w: (x @ w).diagonal(),
    "einsum of three": lambda x, w: torch.einsum("ab,bc,cd->ad", x, w, w),
    "embedding": lambda x, w: F.embedding(torch.arange(6) % 8, w),
    "fft": lambda x, w: torch.fft.fft(x).abs(),
    "gather": lambda x, w: x.gather(1, torch.arange(8)[:, None].expand(8, 3) % 8),
    "gelu tanh": lambda x, w: F.gelu(x, approximate="tanh"),
    "glu": lambda x, w: F.glu(x @ w, -1),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "index_add": lambda x, w: x.index_add(0, torch.tensor([0, 3]), w[:2]),
    "index_put": lambda x, w: x.index_put((torch.tensor([1, 1]),), w[:2], accumulate=True),
    "index_put of other values": lambda x, w: x.index_put((torch.tensor([0, 1]),), w[:2]),
    "integer matmul": lambda x, w: (x * 4).long() @ (w * 4).long(),
    "kthvalue": lambda x, w: x.kthvalue(2, dim=-1).values,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "linalg norm": lambda x, w: torch.linalg.vector_norm(x, dim=1) + x.norm(),
    "linear": lambda x, w: F.linear(x.view(2, 4, 8), w, w[0]),
    "logcumsumexp": lambda x, w: x.logcumsumexp(0),
    "max over all": lambda x, w: x * x.max() + x.min() + x.argmax(),
    "median": lambda x, w: x.median(dim=0).values,
    "nll_loss": lambda x, w: F.nll_loss(x.log_softmax(-1), torch.arange(8)),
    "outer": lambda x, w: torch.outer(x[0], w[:, 0]),
    "pad": lambda x, w: F.pad(x, (1, 2)),
    "scaled_dot_product_attention": lambda x, w: F.scaled_dot_product_attention(*(x.view(1, 2, 4, 8),) * 3, is_causal=True),
    "scatter": lambda x, w: x.scatter(0, torch.arange(8)[None] % 3, w[:1]),
    "searchsorted": lambda x, w: torch.searchsorted(x[0].sort().values, w).double() * w,
    "softmin": lambda x, w: F.softmin(x, 0),
    "var of one dim kept": lambda x, w: x.var(0, keepdim=True) + w.var(1, keepdim=True),
    "std": lambda x, w: x.std(dim=1, keepdim=True) + x.var() + x.std(0),
    "take_along_dim": lambda x, w: x.take_along_dim(x.argsort(1), 1),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
    "topk": lambda x, w: x.topk(3, dim=-1).values,
    "trace of a constant": lambda x, w: x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=x.dtype),
    "triangular": lambda x, w: torch.triu(x @ w, 1) + torch.ones(8, 8, dtype=x.dtype).tril(),
    "unfold": lambda x, w: x.unfold(0, 2, 2),
    "view as complex": lambda x, w: torch.view_as_real(torch.view_as_complex(x.view(8, 4, 2)) * 2),
}


def operands():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]


def simulate(fn, args, in_specs, out_specs=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        return jit(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs).lower(*args).simulate(*args)


@pytest.mark.parametrize("specs", [(P("a"), P("b")), (P("a", "b"), P(None, ("a", "b"))), (P(partial="a"), P("b"))], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_is_exact(name, specs):
    """The value, sharded in several ways, is that of the plain call; so are its gradients where it has any."""
    fn, args = FUNCTIONS[name], operands()
    expected = fn(*args)
    actual = simulate(fn, args, specs)
    assert actual.dtype == expected.dtype
    testing.assert_close(actual.double(), expected.double(), name=name)
    if not expected.is_floating_point():
        return
    loss = lambda primals: fn(*primals).sin().sum()  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in args]
    grads = torch.autograd.grad(loss(leaves), leaves, materialize_grads=True)
    _, actual_grads = simulate(lambda x, w: value_and_grad(loss)([x, w]), args, specs)
    for actual, grad in zip(actual_grads, grads, strict=True):
        error = torch.linalg.vector_norm(actual - grad)
        assert error <= 1e-11 * (1 + torch.linalg.vector_norm(grad)), name


def test_fallback_warns_once_and_names_the_op():
    """An op without a rule says that it is computed whole, and where."""
    fn = lambda x: x.masked_scatter(x > 0, x) + x.masked_scatter(x < 0, x)  # noqa: E731
    with pytest.warns(
        ReplicatedFallback, match=r"aten.masked_scatter.*at sharding/test_torch_ops.py:\d+ has no sharding rule"
    ) as record:
        lowered = jit(fn, mesh=MESH, in_specs=P("a")).lower(operands()[0])
    assert len(record) == 1
    assert lowered.ranked.fallbacks == ("aten.masked_scatter.default",)


WHOLE = {
    "a running product of a sharded vector": (lambda x: x[:, 0].cumprod(0), "cumprod", P("a")),
    "a reversed dim that is sharded": (lambda x: x[:, 0].flip(0), "flip", P("a")),
    "an op without a rule on a pending sum": (lambda x: x.masked_scatter(x > 0, x), "masked_scatter", P(partial="a")),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_computed_whole_says_so(name):
    """An op that the table knows, of which no part can be computed alone, does not gather its operands silently either."""
    fn, op, spec = WHOLE[name]
    with pytest.warns(ReplicatedFallback, match=rf"aten.{op}.*computed whole on every rank"):
        lowered = jit(fn, mesh=MESH, in_specs=spec).lower(operands()[0])
    assert [name.split(".")[1] for name in lowered.ranked.fallbacks] == [op]
    testing.assert_close(lowered.simulate(operands()[0]), fn(operands()[0]))


PARTS = {
    "a norm over a sharded dim": (lambda x: torch.linalg.vector_norm(x), P("a")),
    "a maximum over a sharded dim": (lambda x: x[:, 0].amax(), P("a")),
    "a running sum of a sharded vector": (lambda x: x[:, 0].cumsum(0), P("a")),
    "a norm of each row": (lambda x: torch.linalg.vector_norm(x, dim=1), P("a")),
    "a maximum of each row": (lambda x: x.amax(1), P("a")),
    "a running sum of each row": (lambda x: x.cumsum(1), P("a")),
    "a root of a pending number": (lambda x: x.square().sum().sqrt(), P("a")),
    "an order of each row": (lambda x: x.sort(1).values + x.argsort(1), P("a")),
    "the best of each row": (lambda x: x.topk(3, 1).values.cumprod(1), P("a")),
    "a diagonal of each matrix": (lambda x: x.view(8, 2, 4).diagonal(0, 1, 2), P("a")),
    "windows of each row": (lambda x: x.unfold(1, 3, 2).roll(1, 1).flip(2), P("a")),
    "a convolution of each image": (lambda x: F.conv1d(x[:, None], x[:2, None, :3], padding=1), P("a")),
    "a matrix for each row": (lambda x: torch.linalg.inv(x.view(8, 2, 4)[..., :2] + 4 * torch.eye(2, dtype=x.dtype)), P("a")),
    "a spectrum of each row": (lambda x: torch.fft.rfft(x).abs(), P("a")),
    "copies of each row": (lambda x: F.pad(x.repeat(1, 2), (1, 1)), P("a")),
    "new memory": (lambda x: torch.cat([x.new_empty(0, 8), x]), P("a")),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_computed_in_parts_says_nothing(name):
    """Warnings are errors here."""
    fn, spec = PARTS[name]
    lowered = jit(fn, mesh=MESH, in_specs=spec).lower(operands()[0])
    assert lowered.ranked.fallbacks == ()
    testing.assert_close(lowered.simulate(operands()[0]), fn(operands()[0]))


def mlp(params, x):
    return ops.einsum("bd,df->bf", x, params["w"]).tanh() @ params["v"]


@pytest.fixture
def problem():
    x, w = operands()
    return {"w": w, "v": w.sin()}, x


def test_grad(problem):
    """torch.func.grad inside a compiled function."""
    fn = lambda p, x: torch.func.grad(lambda p: mlp(p, x).square().sum())(p)  # noqa: E731
    actual = simulate(fn, problem, ({"w": P(None, "b"), "v": P("b")}, P("a")))
    expected = fn(*problem)
    for key in expected:
        testing.assert_close(actual[key], expected[key], name=key)


def test_vjp_and_jvp_of_a_gradient(problem):
    """torch.func.vjp, and a gradient of a gradient."""
    params, x = problem

    def fn(p, x):
        y, pull = torch.func.vjp(lambda p: mlp(p, x), p)
        inner = lambda x: torch.func.grad(lambda x: mlp(p, x).pow(3).sum())(x).square().sum()  # noqa: E731
        return pull(y.sin())[0], torch.func.grad(inner)(x)

    actual = simulate(fn, problem, ({"w": P(None, "b"), "v": P("b")}, P("a")))
    expected = fn(params, x)
    testing.assert_close(actual[0]["w"], expected[0]["w"], name="pull back")
    testing.assert_close(actual[1], expected[1], name="second derivative")


def test_vmap_of_a_gradient(problem):
    """torch.func.vmap gives a gradient for each example, with primitives inside."""

    def loss(p, x):
        return ops.rms_norm(mlp(p, x[None]), eps=0.1).square().sum()

    fn = lambda p, x: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(p, x)  # noqa: E731
    actual = simulate(fn, problem, ({"w": P(None, "b"), "v": P("b")}, P("a")))
    expected = fn(*problem)
    for key in expected:
        testing.assert_close(actual[key], expected[key], name=key)


@struct
class Layer:
    """A weight and, perhaps, a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@pytest.mark.parametrize("spec", [P(None, "a"), Layer(P(None, "a"), None), None], ids=["one", "tree", "none"])
def test_absent_fields(spec):
    """A field that is None takes no spec, in arguments and in results; so does an argument that is None."""
    x, w = operands()
    fn = lambda layer, x, mask: Layer((x @ layer.weight).sin() if mask is None else mask)  # noqa: E731
    compiled = jit(fn, mesh=MESH, in_specs=(spec, P("a"), None), out_specs=Layer(P("a"), None))
    lowered = compiled.lower(Layer(w), x, None)
    out = lowered.simulate(Layer(w), x, None)
    alone = jit(fn, mesh=Mesh(a=1))
    testing.assert_close(alone(Layer(w), x, None).weight, (x @ w).sin())
    assert torch.equal(alone(Layer(w), x, x).weight, x)
    assert out.bias is None
    testing.assert_close(out.weight, (x @ w).sin())
    assert lowered.out_specs.weight == P("a")
