"""Fusions: where they apply, where they must not, and that no bit of a result changes."""

import pytest
import torch

from mpar import Mesh, ops
from mpar.compiler import RecomputePolicy
from mpar.compiler.segment import Target, compile_function
from mpar.kernels import Kernels
from mpar.runtime import ALONE, load
from mpar.spec import P

SM_90 = Kernels("auto", "sm_90")
D, N, H = 16, 2, 8


def norms(x, r, w):
    """A residual stream that takes up a branch and is normalised."""
    total = x + r
    return total, ops.rms_norm(total, w)


def layer_norms(x, r, w):
    """The same with LayerNorm."""
    total = x + r
    return ops.layer_norm(total, w, w), total * 2


def norm_alone(x, r, w):
    """A sum that nobody else reads: two ops of which one overwrites are as good."""
    return (ops.rms_norm(x + r, w),)


def norm_of_wider_sum(x, r, w):
    """Operands that are broadcast are no residual stream."""
    total = x + r[:1, :1]
    return total, ops.rms_norm(total, w)


def gradients(x, r, w):
    """What flows back through a residual block."""

    def loss(x, r, w):
        total = x + r
        return (total * ops.rms_norm(total, w)).sum()

    return torch.func.grad(loss, (0, 1, 2))(x, r, w)


def ropes(x, r, w):
    """Queries and keys that nobody reads before they are turned."""
    cos, sin = w[: H // 2].cos().expand(1, 4, H // 2), w[: H // 2].sin().expand(1, 4, H // 2)
    q, k = ((y * 2).view(2, 4, N, H) for y in (x, r))
    return ops.rope(q * 3, cos, sin), ops.rope(k * 3, cos, sin)


def rope_of_what_is_kept(x, r, w):
    """A value that is read again is not overwritten."""
    cos, sin = w[: H // 2].cos().expand(1, 4, H // 2), w[: H // 2].sin().expand(1, 4, H // 2)
    q = (x * 2).view(2, 4, N, H)
    return ops.rope(q, cos, sin), q + 1


CASES = {
    norms: ["add_rms_norm"],
    layer_norms: ["add_layer_norm"],
    norm_alone: ["rms_norm"],
    norm_of_wider_sum: ["rms_norm"],
    gradients: ["add_rms_norm", "add_rms_norm_bwd"],
    ropes: ["rope_many"],
    rope_of_what_is_kept: ["rope"],
}


def compiled(fn, kernels, dtype):
    """Code of `fn` on one rank."""
    args = [torch.empty(2, 4, D, dtype=dtype, device="meta")] * 2 + [torch.empty(D, dtype=dtype, device="meta")]
    return compile_function(fn.__name__, fn, args, Target(Mesh(), {}, RecomputePolicy(), kernels), [P()] * 3)


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_fusion(fn, make_tensor):
    """What is called is what was expected, and without a chip nothing is fused; the results are the same, bit for bit."""
    plain, fused = compiled(fn, Kernels(), torch.float32), compiled(fn, SM_90, torch.float32)
    called = sorted(use.primitive for use in fused.kind.kernels)
    assert called == sorted(CASES[fn])
    assert not plain.kind.kernels
    operands = [make_tensor((2, 4, D)), make_tensor((2, 4, D)), make_tensor((D,))]
    results = [
        load(fn.__name__, code.kind.source, code.kind.constants, torch.device("cpu"))([x.clone() for x in operands], ALONE)
        for code in (plain, fused)
    ]
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def value_and_gradient(logits, labels, read):
    """The loss of logits that an op makes and their gradient; `read` reads the logits once more, or not."""
    made = logits * 2
    loss, pull_back = torch.func.vjp(lambda made: ops.cross_entropy(made, labels)[0], made)
    return loss, pull_back(torch.ones_like(loss))[0], *read(made)


OTHER_READERS = {"none": lambda made: (), "one": lambda made: (made + 1,), "a view": lambda made: (made.view(-1),)}


@pytest.mark.parametrize("kernels", [Kernels(), SM_90], ids=["torch", "sm_90"])
@pytest.mark.parametrize("reader", OTHER_READERS)
def test_gradient_of_a_loss_is_written_over_logits_that_nothing_else_reads(reader, kernels, make_tensor):
    """Only there, and only without kernels of the two ops; results keep their bits, and the peak is lower by the gradient."""
    operands = make_tensor((2, 4, D)), torch.arange(8).view(2, 4)
    fn = lambda logits, labels: value_and_gradient(logits, labels, OTHER_READERS[reader])  # noqa: E731
    abstract = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in operands]
    code = compile_function("loss", fn, abstract, Target(Mesh(), {}, RecomputePolicy(), kernels), [P()] * 2)
    joined = reader == "none" and kernels is not SM_90
    assert ("cross_entropy_grad" in code.kind.source) == joined
    nbytes = operands[0].nbytes
    assert sum(size == nbytes for size in code.kind.memory.sizes) == (2 if joined else 3 + (reader == "one"))
    results = load("loss", code.kind.source, code.kind.constants, torch.device("cpu"))([x.clone() for x in operands], ALONE)
    for actual, expected in zip(results, fn(*operands), strict=True):
        assert torch.equal(actual, expected)


def test_nothing_is_fused_without_its_kernel():
    """In float64, or where torch's ops were asked for, the parts stay."""
    for kernels, dtype in (
        (SM_90, torch.float64),
        (Kernels("torch", "sm_90"), torch.float32),
        (Kernels("auto", "sm_75"), torch.float32),
    ):
        assert "add_rms_norm" not in compiled(norms, kernels, dtype).kind.source
