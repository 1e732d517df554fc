"""Placement: the specs of a model's parameters and batch on a mesh, and the code of all functions of its chain."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from mpar import tree
from mpar.arrange import CONTEXT_PARALLEL, arrange
from mpar.chain import Chain
from mpar.compiler.build._batch import length_of, order_sequence
from mpar.compiler.build._options import CompileOptions
from mpar.compiler.build._segments import SegmentCodes, SegmentCompiler
from mpar.compiler.build._units import Unit, make_units
from mpar.compiler.build._values import global_value
from mpar.compiler.segment import Code, Target, compile_function
from mpar.errors import ConfigError, ShapeError, ShardingError
from mpar.hardware import Hardware
from mpar.ir import segment_time
from mpar.mesh import Mesh
from mpar.precision import Precision
from mpar.strategy import Strategy
from mpar.user_code import user_code

__all__ = ["Placement", "global_results", "place"]


@dataclass(frozen=True)
class Placement:
    """A model on a mesh.

    strategy, target: as `mpar.arrange` made them for the model; the mesh of the target may have split axes.
    batch:            global tensors without data for the batch entries of one piece.
    order_parts:      into how many parts sequences are cut before they are dealt out to the ranks that share them.
    units:            the units of the whole model, by path.
    context, weight:  the code that computes the context and the weight of a piece of the batch. A program that is not
                      differentiable has no losses, and no weight.
    segments:         the code of every segment.
    refused:          the ways to divide attention that were tried and that the model or the mesh does not allow.
    """

    strategy: Strategy
    target: Target
    precision: Precision
    batch: dict[str, Tensor]
    order_parts: int
    units: dict[str, Unit]
    context: Code
    weight: Code | None
    segments: SegmentCodes
    refused: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh, in which axes may have been split."""
        return self.target.mesh


def place(model: Chain, strategy: Strategy, mesh: Mesh, batch: dict[str, Tensor], options: CompileOptions) -> Placement:
    """Place the model on the mesh and compile its segments.

    If `context_parallel` is "auto" and ranks share sequences, each way to divide attention is tried, and the one with the least
    predicted time is taken.
    """
    strategy.check_axes(mesh)
    shares_sequences = mesh.axis_size(strategy.compute.get("seq", ())) > 1
    if strategy.context_parallel != "auto" or not shares_sequences:
        return _place(model, strategy, mesh, batch, options)
    candidates: list[Placement] = []
    refused: dict[str, Exception] = {}
    for method in CONTEXT_PARALLEL:
        try:
            candidates.append(_place(model, replace(strategy, context_parallel=method), mesh, batch, options))
        except (ConfigError, ShapeError, ShardingError) as error:
            refused[method] = error
    if not candidates:
        raise next(iter(refused.values()))
    best = min(candidates, key=lambda placement: _time(placement, options.profile))
    return replace(best, refused=tuple(refused))


def _time(placement: Placement, hardware: Hardware) -> float:
    """Predicted seconds of all forwards and backwards of one microbatch, one after the other."""
    codes = (code for slices in placement.segments.by_segment for code in slices)
    return sum(segment_time(half.kind, placement.mesh, hardware) for code in codes for half in code.halves)


def _place(model: Chain, strategy: Strategy, mesh: Mesh, batch: dict[str, Tensor], options: CompileOptions) -> Placement:
    """Place the model and compile its segments with the way to divide attention that the strategy names."""
    num_slices, precision = options.num_slices, options.precision
    strategy, mesh = arrange(strategy, mesh, model.abstract_params, model.param_axes)
    batch = dict(batch)
    order_parts = order_sequence(model, strategy, mesh, batch, num_slices)
    shapes = {key: (tuple(value.shape), model.batch_axes[key]) for key, value in batch.items()}
    strategy.check(mesh, model.abstract_params, model.param_axes, shapes)
    target = Target(mesh, strategy.compute, options.recompute, options.chosen_kernels, options.hides_for)
    units = make_units(model, strategy, mesh, precision)
    specs = [strategy.compute_spec(model.batch_axes[key], mesh) for key in batch]
    length = length_of(batch)
    how = {"row_length": num_slices * length} if num_slices > 1 else {}
    context = compile_function("context", _of_model(model, "context", **how), (batch,), target, specs, resolve=True)
    how_to_trace = options.training, options.differentiable
    weight = compile_function("weight", _of_model(model, "weight"), (batch,), target, specs) if options.differentiable else None
    compiler = SegmentCompiler(model, strategy, target, precision, units, num_slices, length, *how_to_trace)
    segments = compiler.compile_all(global_results(context, mesh), context.out_specs)
    return Placement(strategy, target, precision, batch, order_parts, units, context, weight, segments)


def _of_model(model: Chain, member: str, **how: int) -> Callable[..., object]:
    """A method of the model that is called with a batch; what it raises says which it was."""
    method = getattr(model, member)

    @functools.wraps(method)
    def call(batch: Mapping[str, Tensor]) -> object:
        with user_code(f"{type(model).__name__}.{member}, of a batch with {sorted(batch)},"):
            return method(batch, **how)

    return call


def global_results(code: Code, mesh: Mesh) -> Mapping[str, Tensor]:
    """What a compiled function returns, as global tensors without data."""
    leaves = [global_value(tuple(v.shape), v.dtype, spec, mesh) for v, spec in zip(code.out_values, code.out_specs, strict=True)]
    assert code.outputs is not None
    return tree.unflatten(code.outputs, leaves)
