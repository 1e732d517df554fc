"""Results: the x that leaves the chain of a program without losses is what the program returns, on every rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar.compiler.build._actions import Actions
from mpar.compiler.build._values import global_value
from mpar.ir import Leaf
from mpar.ops import constrain
from mpar.spec import P

__all__ = ["write_results"]


def write_results(actions: Actions) -> list[Leaf]:
    """Write what makes the leaves of the last x replicated; returns them under their paths in x.

    Along pp only the position of the last stage has them. The others add zeros, so that an all_reduce gives them to all.
    """
    blueprint, writer, values = actions.blueprint, actions.writer, actions.writer.values
    segments, num_positions = blueprint.placement.segments, values.mesh.axis_size("pp")
    names = [path or "x" for path in segments.leaving]
    specs = [spec for _, spec in segments.entering[-1]]
    last_stage = len(blueprint.pipeline.ranges) - 1
    if last_stage in actions.position.stages:
        (waiting,) = actions.edges.outputs[last_stage, 0]
        made = waiting.values
    else:
        like = [global_value(tuple(x.shape), x.dtype, spec, values.mesh) for x, spec in segments.entering[-1]]
        key = tuple((tuple(x.shape), x.dtype) for x in like)
        code = writer.functions.compile("no results", _Zeros(key), (), (), specs, variant=key)
        made = writer.emit("results", code, (), names)
    if num_positions > 1 or any(spec.axes for spec in specs):
        pending = [P(*spec.dims, partial=("pp",)) if num_positions > 1 else spec for spec in specs]
        code = writer.functions.compile("results", _replicated, (values.globals(made),), pending, [P()] * len(names))
        made = writer.emit("results", code, made, names)
    return [writer.metric(name, value) for name, value in zip(names, made, strict=True)]


class _Zeros:
    """Makes zeros of the given shapes and dtypes."""

    def __init__(self, like: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.like = like

    def __call__(self) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in self.like]


def _replicated(values: list[Tensor]) -> list[Tensor]:
    return [constrain(value, P()) for value in values]
