"""Custom ops of torch with a declared sharding rule."""

import warnings

import pytest
import torch

from mpar import Mesh, P, jit, ops, testing
from mpar.errors import ShardingError
from mpar.sharding import ReplicatedFallback

MESH = Mesh(a=2, b=2)


@torch.library.custom_op("mpar_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, power: float) -> torch.Tensor:
    """x^power * weight + bias, row by row."""
    y = x**power * weight
    return y if bias is None else y + bias


def scaled_bwd(dy, x, weight, power):
    """The gradients of x and weight."""
    return dy * power * x ** (power - 1) * weight, (dy * x**power).sum((0, 1))


# torch gives an op of `custom_op` an autograd rule that transforms of torch.func refuse; an op that is defined so has none
torch.library.define("mpar_tests::scaled_bwd", "(Tensor dy, Tensor x, Tensor weight, float power) -> (Tensor, Tensor)")
torch.library.impl("mpar_tests::scaled_bwd", "CompositeExplicitAutograd", scaled_bwd)
torch.library.register_fake("mpar_tests::scaled_bwd", lambda dy, x, w, power: (torch.empty_like(x), torch.empty_like(w)))


@torch.library.custom_op("mpar_tests::undeclared", mutates_args=())
def undeclared(x: torch.Tensor) -> torch.Tensor:
    """An op without a rule."""
    return x * 2


@torch.library.custom_op("mpar_tests::reversed", mutates_args=())
def reversed_(x: torch.Tensor) -> torch.Tensor:
    """An op whose rule below is wrong: it works across the last dim."""
    return x.flip(-1).contiguous()


for op in (scaled, undeclared, reversed_):
    op.register_fake(lambda x, *_: torch.empty_like(x))
ops.declare_sharding(scaled, "... d, d, d -> ... d")
ops.declare_sharding(torch.ops.mpar_tests.scaled_bwd.default, "b s d, b s d, d -> b s d, d", linear="dy")
ops.declare_sharding(reversed_, "... d -> ... d")


class Scaled(torch.autograd.Function):
    """The op with its gradient."""

    @staticmethod
    def forward(x, weight):
        return scaled(x, None, weight, 3.0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.mpar_tests.scaled_bwd(dy.contiguous(), *ctx.saved_tensors, 3.0)


def operands():
    generator = torch.Generator().manual_seed(3)
    return torch.rand(4, 2, 8, generator=generator, dtype=torch.float64), torch.rand(8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, None, ("a", "b")), P(partial="a")], ids=str)
def test_declared_ops_are_sharded(spec):
    """In the value and in the gradients, without warnings; rows and features need no communication."""
    x, weight = operands()
    fn = lambda x, weight: scaled(x, weight, weight, 2.0)  # noqa: E731
    lowered = jit(fn, mesh=MESH, in_specs=(spec, P())).lower(x, weight)
    assert [c.op for c in lowered.collectives()] == (["all_reduce"] if spec.partial else [])
    testing.assert_close(lowered.simulate(x, weight), x**2 * weight + weight)
    gradient = torch.func.grad(lambda both: Scaled.apply(*both).sin().sum())
    lowered = jit(lambda x, weight: gradient((x, weight)), mesh=MESH, in_specs=(spec, P())).lower(x, weight)
    outer = (x**3 * weight).cos()
    actual = lowered.simulate(x, weight)
    testing.assert_close(actual[0], outer * 3 * x**2 * weight, name="dx")
    testing.assert_close(actual[1], (outer * x**3).sum((0, 1)), name="dweight")


def test_an_op_without_a_rule_is_computed_whole():
    """With a warning that names it."""
    x, _ = operands()
    with pytest.warns(ReplicatedFallback, match="mpar_tests.undeclared"):
        lowered = jit(lambda x: undeclared(x), mesh=MESH, in_specs=P("a")).lower(x)
    testing.assert_close(lowered.simulate(x), x * 2)


def test_a_wrong_rule_is_refused():
    """The check runs the op, and does not believe what was declared."""
    x, _ = operands()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit(lambda x: reversed_(x), mesh=MESH, in_specs=P("a")).lower(x).collectives() == []
    with pytest.raises(ShardingError, match=r"mpar_tests\.reversed"):
        jit(lambda x: reversed_(x), mesh=MESH, in_specs=P(None, None, "a")).lower(x)


def test_rules_that_do_not_fit_the_op_are_refused():
    """All problems at once."""
    with pytest.raises(ShardingError) as caught:
        ops.declare_sharding(scaled, "d, d -> d, d", linear="power")
    for problem in (
        r"2 entries for the 3 operands \['x', 'bias', 'weight'\]",
        "2 entries for 1 results",
        r"linear names \['power'\]",
    ):
        assert caught.match(f"(?s).*{problem}")
