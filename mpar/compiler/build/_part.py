"""Part: the instructions of the ranks at one position along pp. They are written action by action, then passes order them."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mpar.compiler.build._actions import Actions
from mpar.compiler.build._backward import write_backward, write_input_half, write_weight_half
from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._boundary import Boundary, declare
from mpar.compiler.build._contexts import Contexts
from mpar.compiler.build._exchange import finished_gradients
from mpar.compiler.build._forward import write_forward
from mpar.compiler.build._gathers import Gathers
from mpar.compiler.build._gradients import Gradients
from mpar.compiler.build._join_work import join_work
from mpar.compiler.build._norm import write_norm
from mpar.compiler.build._passes import advance_sends, insert_frees
from mpar.compiler.build._position import Position, Turn
from mpar.compiler.build._report import write_losses, write_metrics
from mpar.compiler.build._reported import Reported
from mpar.compiler.build._results import write_results
from mpar.compiler.build._transfers import write_transfer
from mpar.compiler.build._update import write_updates
from mpar.compiler.build._waiting import Edges
from mpar.compiler.build._writer import Writer
from mpar.ir import Leaf, Part
from mpar.schedules import Transfer
from mpar.spec import P

__all__ = ["write_part"]


def write_part(blueprint: Blueprint, writer: Writer, number: int) -> tuple[Part, Part]:
    """Write the part of position `number`: the weight of the batch, the actions of the schedule, metrics, losses, the update.

    A program that is not differentiable has neither weight nor losses, but results.

    Returns it with instructions joined where that saves time, and without.
    """
    position = Position(blueprint, number)
    boundary = declare(position, writer.values)
    total, cotangent = _write_weight(blueprint, writer, boundary) if blueprint.options.differentiable else (None, None)
    actions = Actions(
        position=position,
        writer=writer,
        edges=Edges(blueprint.options.num_slices),
        contexts=Contexts(writer, blueprint, boundary),
        gathers=Gathers(writer, position, boundary.params),
        gradients=Gradients(writer, position),
        reported=Reported(writer, blueprint),
        cotangent=cotangent,
        state=dict(boundary.kept),
    )
    for item in position.entries:
        if isinstance(item, Transfer):
            write_transfer(actions, item)
        else:
            for _ in itertools.zip_longest(*(_written(actions, turn) for turn in item)):
                pass  # a segment of each turn was written
    reported = write_metrics(writer, blueprint, actions.reported)
    metrics = _write_losses(actions, total) + [writer.metric(name, value) for name, value in reported.items()]
    state_out = _new_state(actions, boundary)
    gradients: dict[str, int] = {}
    if blueprint.optimizer is not None:
        norm, skip, state_out, gradients = _write_update(actions, boundary, metrics[0].value, reported)
        metrics += [writer.metric("grad_norm", norm), writer.metric("skipped", skip)]
    kept = {leaf.value for leaf in (*state_out, *metrics, *boundary.batch, *boundary.scalars)}
    written = advance_sends(writer.instructions)
    joined = join_work(written, writer.kinds, blueprint.placement.target, paired=blueprint.options.schedule.paired)
    part = Part(
        instructions=insert_frees(written, kept),
        state_in=boundary.state,
        state_out=state_out,
        batch=boundary.batch,
        scalars=boundary.scalars,
        metrics=metrics,
        contributions=actions.gradients.contributions,
        reports=actions.joint_reports,
        carried=actions.carried,
        gradients=gradients,
    )
    return replace(part, instructions=insert_frees(joined, kept)), part


def _write_losses(actions: Actions, total: int | None) -> list[Leaf]:
    """Write the losses of the batch, whose weight is `total`; or the results of a program that has no losses."""
    if total is None or actions.cotangent is None:
        return write_results(actions)
    losses = write_losses(actions.writer, actions.blueprint, actions.reported, actions.cotangent)
    return [*losses, actions.writer.metric("weight", total)]


def _new_state(actions: Actions, boundary: Boundary) -> list[Leaf]:
    """The leaves of the state after the forwards: that of segments is new, parameters are as before."""
    pairs = (zip(kept, actions.state[segment], strict=True) for segment, kept in boundary.kept.items())
    new_values = {old: new for of_segment in pairs for old, new in of_segment}
    return [replace(leaf, value=new_values.get(leaf.value, leaf.value)) for leaf in boundary.state]


def _write_weight(blueprint: Blueprint, writer: Writer, boundary: Boundary) -> tuple[int, int]:
    """Write the total weight of the batch and its reciprocal, the cotangent of every loss; returns both values."""
    total: int | None = None
    for piece, inputs in boundary.batch_values.items():
        names = [f"weight.mb{blueprint.piece_name(piece)}"]
        assert blueprint.placement.weight is not None
        (weight,) = writer.emit("weight", blueprint.placement.weight, inputs, names, "", piece)
        total = weight if total is None else writer.add([total], [weight], ["weight"], "", piece)[0]
    assert total is not None
    values = writer.values
    code = writer.functions.compile("total", _with_reciprocal, tuple(values.globals([total])), values.specs([total]), [P(), P()])
    total, cotangent = writer.emit("weight", code, [total], ["total", "cotangent"])
    return total, cotangent


def _with_reciprocal(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and its reciprocal. For a weight of 0 the reciprocal is taken as 0, so that loss and gradients are 0."""
    return weight, torch.where(weight == 0, 0.0, 1.0 / torch.where(weight == 0, 1.0, weight))


def _written(actions: Actions, turn: Turn) -> Iterator[None]:
    """Write one turn of a stage, segment by segment. If no stage waits for its input gradients, as for those of the first stage,
    its I does nothing and its W does all."""
    stage, kind, microbatches = turn
    divided = actions.position.returns_gradients(stage)
    if kind == "F":
        yield from write_forward(actions, stage, microbatches)
    elif kind == "B" or (kind == "W" and not divided):
        yield from write_backward(actions, stage, microbatches)
    elif kind == "W":
        yield from write_weight_half(actions, stage, microbatches)
    elif divided:
        yield from write_input_half(actions, stage, microbatches)


def _write_update(
    actions: Actions, boundary: Boundary, loss: int, reported: dict[str, int]
) -> tuple[int, int, list[Leaf], dict[str, int]]:
    """Write the exchange of gradients, the norm and the update.

    Returns the value of the gradient norm, that of whether the update is skipped, the leaves of the new state, and the finished
    gradient of each parameter by path.
    """
    position, writer = actions.position, actions.writer
    finished = finished_gradients(position, writer, actions.gradients)
    lr, step, *limits = [leaf.value for leaf in boundary.scalars]
    norm, scale, skip = write_norm(position, writer, finished, loss, limits)
    new = write_updates(position, writer, boundary, finished, (lr, step, scale, skip), reported)
    state_out = [replace(leaf, value=new.get(leaf.path, leaf.value)) for leaf in boundary.state]
    units = position.trained_units
    gradients = {p: v for path, unit in units.items() for p, v in zip(unit.paths, finished[path], strict=True)}
    return norm, skip, state_out, gradients
