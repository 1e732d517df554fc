"""Any pure function of tensors, compiled for any mesh and specs, computes what the function computes."""

import warnings

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpar import jit, value_and_grad
from mpar.sharding import ReplicatedFallback
from mpar.sharding._simulate import distribute, run_lockstep
from mpar.shards import assemble
from tests.sharding.expressions import expressions, meshes, specs
from tests.tiers import examples

THOROUGH = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


def split(x, spec, mesh, generator):
    """Shards whose pending parts are all different from zero, so that a non-linear op on one of them shows."""
    if not spec.partial:
        return distribute(x, spec, mesh)
    columns = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(mesh.axis_size(spec.partial) - 1)]
    parts = [*columns, x - sum(columns, torch.zeros_like(x))]
    whole = [distribute(part, type(spec)(*spec.dims), mesh) for part in parts]
    return [whole[mesh.index(rank, spec.partial)][rank] for rank in range(mesh.size)]


def assert_same(lowered, args, expected):
    """What all ranks compute, put together, is `expected` but for rounding; sums of zero are zero to the same accuracy."""
    ranked = lowered.ranked
    generator = torch.Generator().manual_seed(1)
    columns = [split(x, spec, ranked.mesh, generator) for x, spec in zip(args, ranked.in_specs, strict=True)]
    results = run_lockstep(ranked.graph, ranked.mesh, columns, ranked.logical.constants)
    for index, (column, spec, want) in enumerate(zip(results, ranked.out_specs, expected, strict=True)):
        got = assemble(column, spec, ranked.mesh)
        assert got.shape == want.shape and got.dtype == want.dtype, (index, got.shape, want.shape)
        error = torch.linalg.vector_norm(got - want)
        assert error <= 1e-11 * (1 + torch.linalg.vector_norm(want)), f"result {index}: {float(error)}\n{lowered}"


def numbers(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def compile_(fn, args, draw, mesh, results):
    in_specs = tuple(draw(specs(x.shape, mesh)) for x in args)
    out_specs = [draw(st.none() | specs(y.shape, mesh, pending=False)) for y in results]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        return jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs).lower(*args)


@settings(THOROUGH, max_examples=examples(120))
@given(st.data())
def test_random_function_is_exact(data):
    """A function of several results."""
    mesh = data.draw(meshes())
    fn = data.draw(expressions(mesh))
    args = numbers(fn.shapes)
    expected = fn(*args)
    lowered = compile_(fn, args, data.draw, mesh, expected)
    assert_same(lowered, args, expected)


@settings(THOROUGH, max_examples=examples(80))
@given(st.data())
def test_random_gradient_is_exact(data):
    """A value and its gradients."""
    mesh = data.draw(meshes())
    fn = data.draw(expressions(mesh, max_steps=5))
    args = numbers(fn.shapes)

    def scalar(primals):
        return sum(torch.sin(y).sum() for y in fn(*primals))

    def both(*primals):
        value, grads = value_and_grad(scalar)(primals)
        return [value, *grads]

    leaves = [x.clone().requires_grad_() for x in args]
    value = scalar(leaves)
    grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    expected = [value.detach(), *grads]
    lowered = compile_(both, args, data.draw, mesh, expected)
    assert_same(lowered, args, expected)
