"""Ops of torch that work across a sharded dim: what each rank computes is right, and what it sends is small."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, testing, value_and_grad
from mpar.sharding import ReplicatedFallback, collectives_of

SQUARE, ROW = Mesh(a=2, b=2), Mesh(a=4)
SPECS = [P("a", "b"), P(("a", "b")), P(None, ("a", "b")), P("b", partial="a")]
FIRST, SECOND = torch.tensor([1, 7, 3, 3, 0, 5, 6, 2]), torch.tensor([2, 2, 0, 1, 7, 5, 6, 3])
LABELS = torch.tensor([1, 7, 3, -100, 0, 5, 6, 2])
WEIGHT = torch.linspace(-1, 1, 8, dtype=torch.float64)
TABLE = torch.outer(WEIGHT, WEIGHT.exp())
ONE, ROWS = 8, 64
"""Bytes of a number, and of one number for each of the 8 columns, in float64."""

REDUCE, TWICE = ["all_reduce 64"], ["all_reduce 64", "all_reduce 64"]
MESSAGES = {
    # two reductions, of the maximum and of the sum; the gradient adds the sum of products
    "softmax": (lambda x: x.softmax(0), TWICE, [*TWICE, *REDUCE]),
    "log_softmax": (lambda x: x.log_softmax(0), TWICE, [*TWICE, *REDUCE]),
    "logsumexp": (lambda x: x.logsumexp(0), TWICE, TWICE),
    # of a maximum, and for its gradient the number of elements that have it
    "amax": (lambda x: x.amax(0), REDUCE, TWICE),
    "amin": (lambda x: x.amin(0, keepdim=True), REDUCE, TWICE),
    "max of all": (lambda x: x.max(), ["all_reduce 8"], ["all_reduce 8"] * 2),
    "smallest integer": (lambda x: (x * 4).long().amin(0), REDUCE, None),
    "largest truth": (lambda x: (x > 1).amax(0), ["all_reduce 8"], None),
    # of a maximum, and of the first place that has it
    "max and index": (lambda x: x.round().max(0).indices, TWICE, None),
    "min and index": (lambda x: x.round().min(0, keepdim=True).indices, TWICE, None),
    "max of a dim": (lambda x: x.max(0).values, REDUCE, TWICE),
    "argmax": (lambda x: x.round().argmax(0), TWICE, None),
    "argmin": (lambda x: x.round().argmin(0), TWICE, None),
    "argmax of all": (lambda x: x.round().argmax(), ["all_reduce 8"] * 2, None),
    "any": (lambda x: (x > 1).any(0), ["all_reduce 8"], None),
    "any of all": (lambda x: (x > 1).any(), ["all_reduce 1"], None),
    "all": (lambda x: (x > -1).all(0), ["all_reduce 8"], None),
    # of the mean and of the squares of deviations; the gradient takes the mean again, as torch writes it
    "mean": (lambda x: x.mean(0), REDUCE, REDUCE),
    "var": (lambda x: x.var(0), TWICE, [*TWICE, *REDUCE]),
    "std": (lambda x: x.std(0, correction=0), TWICE, [*TWICE, *REDUCE]),
    "var_mean": (lambda x: sum(torch.var_mean(x, 0)), TWICE, [*TWICE, *REDUCE]),
    # one sum; gradients of maximal norms count the elements that have the maximum
    **{
        f"norm {p}": (lambda x, p=p: torch.linalg.vector_norm(x, p, dim=0), REDUCE, REDUCE if abs(p) != torch.inf else TWICE)
        for p in (0, 0.5, 1, 2, 3, -1, torch.inf, -torch.inf)
    },
    "norm of all": (lambda x: x.norm(), ["all_reduce 8"], ["all_reduce 8"]),
    # the products or sums of the shards
    "prod": (lambda x: x.prod(0), ["all_gather 64"], None),
    "prod of all": (lambda x: x.prod(), ["all_gather 8"], None),
    "cumsum": (lambda x: x.cumsum(0), ["all_gather 64"], None),
    "cumsum of integers": (lambda x: (x * 4).long().cumsum(0), ["all_gather 64"], None),
    # mean and squares; in the gradient both sums in one message; then the sum of the loss
    "batch_norm": (lambda x: F.batch_norm(x, None, None, WEIGHT, WEIGHT, training=True), TWICE, [*TWICE, "all_reduce 128"]),
    "layer_norm of all dims": (lambda x: F.layer_norm(x, (8, 8)), ["all_reduce 8"] * 2, ["all_reduce 8"] * 2 + ["all_reduce 16"]),
    # a pending sum of what is chosen; nothing for its gradient but the sum of the loss, or what the loss itself needs
    "gather": (lambda x: x.gather(0, FIRST[None].expand(3, 8)), ["all_reduce 192"], ["all_reduce 192"]),
    "index_select": (lambda x: x.index_select(0, FIRST[:2]), ["all_reduce 128"], ["all_reduce 128"]),
    "index": (lambda x: x[SECOND[:2] - 8], ["all_reduce 128"], ["all_reduce 128"]),
    "index of both dims": (lambda x: x[FIRST, SECOND], REDUCE, REDUCE),
    "select": (lambda x: x[3], REDUCE, REDUCE),
    "embedding": (lambda x: F.embedding(SECOND[:2], x), ["all_reduce 128"], ["all_reduce 128"]),
    "gather of truths": (lambda x: (x > 0).gather(0, FIRST[None]), ["all_reduce 8"], None),
    # the row that crosses a border goes to the next rank; the gradient moves it back, which among four ranks is a gather of them
    "roll": (lambda x: x.roll(1, 0), ["shift 64"], ["shift 64", "all_gather 64"]),
    "roll back": (lambda x: x.roll(-9, 0), ["all_gather 64"], ["all_gather 64", "shift 64"]),
    "pad and slice": (lambda x: F.pad(x, (0, 0, 1, 0))[:-1], ["shift 64"], ["shift 64", "all_gather 64"]),
    "slice and pad": (lambda x: F.pad(x[1:], (0, 0, 0, 1), value=2.0), ["all_gather 64"], ["all_gather 64", "shift 64"]),
    "zeros before": (lambda x: torch.cat([x.new_zeros(1, 8), x[:-1]]), ["shift 64"], ["shift 64", "all_gather 64"]),
    "topk": (lambda x: x.topk(1, dim=0).values, ["all_gather 64"], None),
    # keys and values, which are one tensor here; their gradients are summed where they are needed
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 8, 8)] * 3, is_causal=True).view(8, 8),
        ["all_gather 128"],
        ["all_gather 128", "reduce_scatter 512", "reduce_scatter 512"],
    ),
    # a rank writes what belongs into its rows, and takes what it has of a diagonal; of sharded columns that is a part of a sum
    "scatter": (lambda x: x.scatter(0, FIRST[None], WEIGHT[None]), [], []),
    "scatter of a number": (lambda x: x.scatter(0, torch.stack([FIRST, SECOND]), 2.0), [], []),
    "index_copy": (lambda x: x.index_copy(0, FIRST[:2], TABLE[:2]), [], []),
    "index_fill": (lambda x: x.index_fill(0, FIRST[:3] - 8, 2.0), [], []),
    "diagonal": (lambda x: x.diagonal(), [], []),
    "diagonal of columns": (lambda x: x[:, :4].diagonal(), ["all_reduce 32"], ["all_reduce 32"]),
}  # fmt: skip
"""What crosses dim 0 of an 8 x 8 tensor that four ranks share: the messages of the function, and of it with its gradient."""

MORE = {
    "softmax of rows": lambda x: x.softmax(-1),
    "mean of log-likelihoods": lambda x: -x.log_softmax(1)[torch.arange(8), SECOND].mean(),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross_entropy of each row": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "weighted cross_entropy": lambda x: F.cross_entropy(x, LABELS, weight=WEIGHT.abs()),
    "smoothed cross_entropy": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "cross_entropy of one row": lambda x: F.cross_entropy(x[0], LABELS[0]),
    "cross_entropy of an image": lambda x: F.cross_entropy(x.view(2, 4, 8), FIRST.view(2, 4).repeat(1, 2) % 4),
    "nll_loss": lambda x: F.nll_loss(x, LABELS, reduction="sum"),
    "layer_norm": lambda x: F.layer_norm(x, (8,), WEIGHT, WEIGHT.sin()),
    "layer_norm by its operand": lambda x: F.layer_norm(x, (8,), x[0], x[1]),
    "batch_norm of images": lambda x: F.batch_norm(x.view(4, 2, 8), None, None, x[0, :2], None, training=True),
    "cumsum of rows": lambda x: x.cumsum(-1),
    "scatter_add": lambda x: x.scatter_add(0, FIRST[None].expand(8, 8), x),
    "scatter_add to zeros": lambda x: torch.zeros_like(x).scatter_add(0, torch.stack([FIRST, SECOND] * 4), x),
    "index_add": lambda x: x.index_add(1, SECOND[:4], x[:, :4], alpha=2),
    "index_add to zeros": lambda x: torch.zeros_like(x).index_add(0, SECOND, x),
    "index_put": lambda x: x.index_put((FIRST, SECOND), x[0], accumulate=True),
    "index_put to zeros": lambda x: torch.zeros_like(x).index_put((SECOND,), x, accumulate=True),
    "index beside a slice": lambda x: x.view(2, 4, 8)[:, FIRST % 4, SECOND],
    "index around a slice": lambda x: x.view(2, 4, 8)[FIRST % 2, :, SECOND],
    "causal attention to more keys": lambda x: F.scaled_dot_product_attention(
        x.view(1, 1, 4, 2, 8)[:, :, :, 0], *[x.view(1, 1, 8, 8).sin()] * 2, is_causal=True, scale=0.3
    ),
    "causal attention of heads": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 4, 8)] * 3, is_causal=True),
    "scatter to rows": lambda x: x.scatter(1, torch.stack([FIRST, SECOND, LABELS.abs() % 8]).T[:4], x[2:6, ::3]),
    "largest of a scatter": lambda x: x.scatter_reduce(0, torch.stack([FIRST, FIRST, SECOND]), TABLE[:3], "amax"),
    "means of a scatter": lambda x: x.scatter_reduce(0, torch.stack([FIRST] * 3), x[:3], "mean", include_self=False),
    "scatter that multiplies": lambda x: (x * 4).long().scatter(0, torch.stack([FIRST, FIRST]), 3, reduce="multiply"),
    "copies of columns": lambda x: x.index_copy(1, FIRST[:2], x[:, 2:4]),
    "fill by a tensor": lambda x: x.index_fill(0, SECOND[1:4], x[2, 2]),
    "shortened diagonal": lambda x: x.diagonal(1) * x.diagonal(-1),
    "diagonal of blocks": lambda x: x.view(2, 4, 8).diagonal(-2, 2, 1) + x.view(2, 4, 8).diagonal(4, 1, 2),
    "diagonal of slices": lambda x: x.view(2, 4, 8).diagonal(3, 0, -1),
    "truths of a diagonal": lambda x: (x > 0).diagonal(),
    "trace": lambda x: x.trace() + x[:, :4].diagonal(-3).sum(),
    "padded embedding": lambda x: F.embedding(torch.stack([FIRST, SECOND]), x, padding_idx=2),
    "roll of both dims": lambda x: x.roll((1, -2), (0, 1)),
    "roll of all elements": lambda x: x.roll(3),
    "roll beyond a shard": lambda x: x.roll(3, 0) + x.roll(4, 1),
    "shift beyond a shard": lambda x: F.pad(x[:-5], (0, 0, 5, 0), value=1.0),
    "shift of both dims": lambda x: F.pad(x, (1, -1, -2, 2)),
    "pad": lambda x: F.pad(x, (1, 1)) + F.pad(x, (2, 0)),
    "crop that is filled": lambda x: F.pad(x[1:], (0, 0, 1, 0), value=3.0),
    "smallest five": lambda x: x.topk(5, dim=1, largest=False).values,
    "places of the largest": lambda x: x.topk(3, dim=0).indices,
    "choice of the largest": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "distribution of all": lambda x: x.logsumexp((0, 1), keepdim=True) + x.std((0, 1)) + x.cumsum(0).amax((0, 1)),
}


@pytest.fixture
def x():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def lowered(fn, x, mesh, spec):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        return jit(fn, mesh=mesh, in_specs=spec).lower(x)


def messages(fn, x):
    return [f"{found.op} {found.bytes}" for found in collectives_of(lowered(fn, x, ROW, P("a")).ranked)]


def with_gradient(fn):
    return lambda x: value_and_grad(lambda x: fn(x).sin().sum())(x)


FUNCTIONS = {name: fn for name, (fn, *_) in MESSAGES.items()} | MORE


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_gradient_are_exact(name, x):
    """On two meshes, with every dim sharded and with pending sums; ties go to the first index, as torch's do."""
    fn = FUNCTIONS[name]
    expected = fn(x)
    leaf = x.clone().requires_grad_()
    loss = fn(leaf).sin().sum() if expected.is_floating_point() else None
    gradient = None if loss is None else torch.autograd.grad(loss, leaf, materialize_grads=True)[0]
    for mesh, spec in [*((SQUARE, spec) for spec in SPECS), (ROW, P("a")), (ROW, P(None, "a"))]:
        actual = lowered(fn, x, mesh, spec).simulate(x)
        assert actual.dtype == expected.dtype
        testing.assert_close(actual.double(), expected.double(), name=f"{name} by {spec}")
        if gradient is not None:
            found = lowered(with_gradient(fn), x, mesh, spec).simulate(x)[1]
            error = torch.linalg.vector_norm(found - gradient)
            assert error <= 1e-11 * (1 + torch.linalg.vector_norm(gradient)), (name, spec, float(error))


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name, x):
    """How many messages, and of how many bytes: as few numbers as the result has, never the operand."""
    fn, forward, both = MESSAGES[name]
    assert messages(fn, x) == forward
    if both is not None:
        sent = messages(with_gradient(fn), x)
        assert sent == both or sent == [*both, "all_reduce 8"], sent


def test_vocabulary_of_a_loss_is_not_gathered(x):
    """Rows and classes sharded: maximum and sum for each row, in the gradient one sum more; then the loss."""
    fn = lambda x: F.cross_entropy(x, LABELS)  # noqa: E731
    found = collectives_of(lowered(lambda x: value_and_grad(fn)(x), x, SQUARE, P("a", "b")).ranked)
    assert [(c.op, c.axes, c.bytes) for c in found] == [
        ("all_reduce", ("b",), 32),
        ("all_reduce", ("b",), 32),
        ("all_reduce", ("b",), 32),
        ("all_reduce", ("a", "b"), 8),
    ]


@pytest.mark.parametrize("infinite", ["one", "row", "nan"])
def test_infinities_and_nans(infinite, x):
    """A row of -inf, one +inf and a NaN give what torch gives."""
    x[2:4] = {"one": x[2:4], "row": -torch.inf, "nan": x[2:4]}[infinite]
    x[5, 5] = {"one": torch.inf, "row": 0.0, "nan": torch.nan}[infinite]
    for fn in (torch.logsumexp, torch.softmax, torch.amax, torch.amin, torch.argmax, torch.cumsum):
        for dim in (0, 1):
            actual = lowered(lambda x, fn=fn, dim=dim: fn(x, dim), x, ROW, P("a") if dim == 0 else P(None, "a")).simulate(x)
            torch.testing.assert_close(actual, fn(x, dim), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a"), P(partial="a")], ids=str)
def test_halves_are_added_wide(dtype, spec):
    """Sums of 4096 numbers near 30, which float16 cannot hold on the way to their mean; each is rounded once, on every mesh."""
    x = (torch.rand(4096, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 60 + 1).to(dtype)
    for fn in (
        lambda x: x.mean(),
        lambda x: x.mean(0),
        lambda x: x.sum(1),
        lambda x: x.var(0),
        lambda x: x.norm(dim=0),
        lambda x: x.softmax(0),
        lambda x: (x / 100).cumsum(0),
    ):
        actual = lowered(fn, x, ROW, spec).simulate(x)
        assert actual.dtype == dtype
        testing.assert_close(actual, fn(x.double()), name=str(spec))
