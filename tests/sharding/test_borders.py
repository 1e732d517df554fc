"""Convolutions and windows along a sharded dim: exact, and ranks send only the rows at their borders."""

import pytest
import torch
import torch.nn.functional as F

from mpar import Mesh, P, jit, testing, value_and_grad
from mpar.sharding import collectives_of, trace
from mpar.sharding._join_pads import join_pads
from tests.sharding.test_canonicalise import text

ROW, SQUARE = Mesh(a=4), Mesh(a=2, b=2)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


X, IMAGE = numbers(2, 4, 8), numbers(2, 4, 8, 8)
ONE, TWO, EACH, FULL = numbers(4, 1, 3), numbers(6, 4, 3), numbers(4, 1, 4), numbers(6, 4, 3, 3)
BIAS = numbers(6)
CASES = {
    "causal": (lambda x, w: F.conv1d(F.pad(x, (3, 0)), w, BIAS[:4], groups=4), X, EACH),
    "causal by a cut": (lambda x, w: F.conv1d(x, w, BIAS[:4], padding=3, groups=4)[..., :8], X, EACH),
    "of an image, cut on both sides": (lambda x, w: F.conv2d(x, w, padding=3)[:, :, 1:9, 3:-1], IMAGE, FULL),
    "before a pad": (lambda x, w: F.pad(F.conv1d(x, w, groups=4), (1, 1)), X, ONE),
    "of a part": (lambda x, w: F.conv1d(F.pad(x, (3, 0)), w[..., 1:], groups=4)[..., 2:], X, EACH),
    "causal and dilated": (lambda x, w: F.conv1d(F.pad(x, (4, 0)), w, dilation=2, groups=4), X, ONE),
    "centred": (lambda x, w: F.conv1d(x, w, BIAS, padding=1), X, TWO),
    "centred by a pad and by itself": (lambda x, w: F.conv1d(F.pad(x, (1, 0)), w, padding=1, groups=4), X, EACH),
    "looking ahead": (lambda x, w: F.conv1d(F.pad(x, (0, 2)), w), X, TWO),
    "more rows than a shard has": (lambda x, w: F.conv1d(F.pad(x, (4, 2)), w, dilation=3), X, TWO),
    "of an image": (lambda x, w: F.conv2d(x, w, BIAS, padding=1), IMAGE, FULL),
    "of an image that loses rows": (lambda x, w: F.conv2d(F.pad(x, (2, 0)), w), IMAGE, FULL),
    "mean of windows": (lambda x, w: F.pad(x * w[0, 0, 0], (3, 0)).unfold(2, 4, 1).mean(-1), X, EACH),
    "largest of windows": (lambda x, w: F.pad(x, (1, 2), value=0.5).unfold(-1, 4, 1).amax(-1) * w[0, 0, 0], X, EACH),
    "windows of another dim": (lambda x, w: F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).cumsum(-1) * w[0, 0, 0], X, EACH),
    "windows of integers": (lambda x, w: F.pad((x * 4).long(), (6, 0)).unfold(2, 7, 1).sum(-1) * w[0, 0, 0], X, EACH),
}
SPECS = [
    (ROW, P(None, None, "a")),
    (SQUARE, P("a", None, "b")),
    (SQUARE, P(None, "b", "a")),
    (SQUARE, P(None, None, ("a", "b"))),
    (SQUARE, P(None, None, "b", "a")),
    (SQUARE, P("a", "b")),
    (SQUARE, P(None, None, "a", partial="b")),
]


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_exact(name):
    """With the dim of the windows on two and on four ranks, on two axes, beside other sharded dims, and with sums pending."""
    fn, *args = CASES[name]
    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(fn(*leaves).sin().sum(), leaves, materialize_grads=True)
    both = lambda *args: (fn(*args), value_and_grad(lambda primals: fn(*primals).sin().sum())(args))  # noqa: E731
    for mesh, spec in SPECS:
        if len(spec.dims) <= args[0].ndim:
            value, (_, gradients) = jit(both, mesh=mesh, in_specs=(spec, P())).lower(*args).simulate(*args)
            testing.assert_close(value, fn(*args), name=f"{name} by {spec}")
            for actual, gradient in zip(gradients, expected, strict=True):
                testing.assert_close(actual, gradient, name=f"gradient of {name} by {spec}")


def messages(name, mesh, spec, *, gradient=False):
    fn, *args = CASES[name]
    fn = value_and_grad(lambda *args, fn=fn: fn(*args).sin().sum(), argnums=(0, 1)) if gradient else fn
    found = collectives_of(jit(fn, mesh=mesh, in_specs=(spec, P())).lower(*args).ranked)
    return [f"{each.op} {each.bytes}" for each in found]


def test_only_borders_are_sent():
    """Three rows for a causal window of four; of an image one row, then one column with the new rows, on either side."""
    assert messages("causal", SQUARE, P("a", None, "b")) == ["shift 96"]
    assert messages("centred", SQUARE, P("a", None, "b")) == ["shift 32", "shift 32"]
    assert messages("of an image", SQUARE, P(None, None, "a", "b")) == ["shift 256"] * 2 + ["shift 384"] * 2
    assert messages("mean of windows", SQUARE, P(None, None, "a")) == ["shift 192"]
    assert messages("more rows than a shard has", ROW, P(None, None, "a")) == ["all_gather 128"]
    assert messages("causal by a cut", SQUARE, P("a", None, "b")) == ["shift 96"]
    for name in ("causal", "causal by a cut", "mean of windows"):
        assert "gather" not in " ".join(messages(name, SQUARE, P("a", None, "b"), gradient=True)), name
    assert messages("causal", SQUARE, P("a", "b")) == []


def test_a_pad_and_its_reader_are_joined():
    """A pad is joined with what reads it if a size is kept; a stride, other pads, and windows of a smaller result stay."""
    logical = trace(lambda x, w: F.conv1d(F.pad(x, (2, 0)), w), (X, TWO), canonical=False)
    join_pads(logical.graph)
    assert text(logical.graph) == [
        "convolution_default = convolution(arg0_1, arg1_1, None, [2], [0], [1])",
        "return convolution_default",
    ]
    for fn in (
        lambda x, w: F.conv1d(F.pad(x, (2, 0)), w, stride=2),
        lambda x, w: F.conv1d(F.pad(x, (2, 0), value=1.0), w),
        lambda x, w: F.conv1d(F.pad(x, (3, 0)), w),
        lambda x, w: F.pad(x, (3, 0)).unfold(2, 4, 2),
        lambda x, w: F.pad(x, (3, 0)).unfold(2, 3, 1),
    ):
        logical = trace(fn, (X, TWO), canonical=False)
        before = text(logical.graph)
        join_pads(logical.graph)
        assert text(logical.graph) == before
