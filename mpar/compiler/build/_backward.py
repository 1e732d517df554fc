"""Backward: the instructions of a stage's backward with a microbatch, as a whole or in two halves.

I gives the gradients of the stage's input, W those of its parameters. Each goes through the segments of the stage, last first,
and in each segment through the slices, last first.
"""

from collections.abc import Callable, Iterator, Sequence

from mpar.compiler.build._actions import Actions
from mpar.compiler.build._waiting import CarriedGradients, Saved, Waiting
from mpar.compiler.segment import split_segment
from mpar.ir import Piece, SegmentResult

__all__ = ["write_backward", "write_input_half", "write_weight_half"]

WriteSegment = Callable[[Actions, int, int, Piece, list[int]], list[int]]
"""`write(actions, stage, segment, piece, primals)` writes the instruction for one slice of a segment. It returns the gradients of
the segment's x, then those of what past slices carried over."""


def write_backward(actions: Actions, stage: int, microbatches: Sequence[int]) -> Iterator[None]:
    """Write the backward of a stage as a whole, in each segment microbatch by microbatch; pauses behind each segment."""
    return _go_back(actions, stage, microbatches, _write_segment)


def write_input_half(actions: Actions, stage: int, microbatches: Sequence[int]) -> Iterator[None]:
    """Write I: the half that gives the gradients of the stage's input."""
    return _go_back(actions, stage, microbatches, _write_input_half)


def write_weight_half(actions: Actions, stage: int, microbatches: Sequence[int]) -> Iterator[None]:
    """Write W: the half that gives the gradients of the stage's parameters."""
    for segment in reversed(actions.segments_of(stage)):
        if not actions.blueprint.trained_paths(segment):
            continue
        for microbatch in microbatches:
            _write_weight_half(actions, stage, segment, microbatch)
        actions.gathers.next_use()
        yield


def _write_weight_half(actions: Actions, stage: int, segment: int, microbatch: int) -> None:
    """Write W for all slices of a segment."""
    blueprint = actions.blueprint
    params = actions.gathers.parameters(blueprint.segments[segment].paths, microbatch)
    for piece in reversed(blueprint.pieces(microbatch)):
        split = split_segment(blueprint.codes[segment][piece.slice])
        saved = actions.edges.saved[stage, microbatch][segment, piece.slice]
        primals = _primals(actions, stage, segment, piece, params)
        assert saved.dy is not None and saved.crossing is not None
        operands = [
            *(primals[i] for i in split.weight_reads),
            *(saved.kept.values[i] for i in split.weight_kept),
            *saved.crossing,
            *(saved.dy[i] for i in split.weight_cotangents),
        ]
        names = [f"d {path}.mb{blueprint.piece_name(piece)}" for path in blueprint.trained_paths(segment)]
        out = actions.writer.emit("backward_weight", split.weight, operands, names, blueprint.segments[segment].name, piece)
        actions.gradients.take(stage, segment, out, piece)
        del actions.edges.saved[stage, microbatch][segment, piece.slice]


def _go_back(actions: Actions, stage: int, microbatches: Sequence[int], write: WriteSegment) -> Iterator[None]:
    """Go through a stage, last segment first, and hand the gradients of its input to the stage before it.

    `write` writes the instruction for each slice of each segment.
    """
    edges = actions.edges
    dys = {m: edges.cotangents.pop((stage, m), edges.nothing()) for m in microbatches}
    for segment in reversed(actions.segments_of(stage)):
        if not actions.blueprint.placement.segments.has_backward(segment):
            continue
        for microbatch in microbatches:
            dys[microbatch] = _go_back_segment(actions, stage, segment, microbatch, dys[microbatch], write)
        actions.gathers.next_use()
        yield
    for microbatch in microbatches:
        actions.hand_back(stage, microbatch, dys[microbatch])


def _go_back_segment(
    actions: Actions, stage: int, segment: int, microbatch: int, dys: list[Waiting], write: WriteSegment
) -> list[Waiting]:
    """Write all slices of a segment, last first, for the gradients `dys` of what it gave; returns those of what entered it."""
    blueprint = actions.blueprint
    dxs, params = actions.edges.nothing(), None
    starts_stage = segment == actions.segments_of(stage)[0]
    num_carried = [blueprint.num_active_carried(segment, c) for c in range(blueprint.options.num_slices)]
    carried_gradients = CarriedGradients(actions.writer, blueprint.segments[segment].name, num_carried)
    for piece in reversed(blueprint.pieces(microbatch)):
        code, num_x = blueprint.codes[segment][piece.slice], len(blueprint.placement.segments.active[segment][piece.slice])
        if code.backward is None:
            continue
        saved = _fetch_saved(actions, stage, segment, piece)
        actions.fetch(dys, segment, microbatch, (piece.slice, piece.slice - 1))
        params = actions.gathers.parameters(blueprint.segments[segment].paths, microbatch) if params is None else params
        assert actions.cotangent is not None
        of_losses = [actions.cotangent] * code.traced.num_active_losses
        saved.dy = [*dys[piece.slice].values, *carried_gradients.take(piece), *of_losses]
        grads = write(actions, stage, segment, piece, _primals(actions, stage, segment, piece, params))
        carried_gradients.add(piece, blueprint.past(segment, piece), grads[num_x:])
        dxs[piece.slice] = actions.until_next_segment(grads[:num_x], segment, piece, ends_stage=starts_stage)
    return dxs


def _fetch_saved(actions: Actions, stage: int, segment: int, piece: Piece) -> Saved:
    """What a slice's forward saved for its backward, brought to the device.

    What the slice that comes next in the backward needs is fetched too, so that it travels while this one computes.
    """
    m, c = piece
    saved, blueprint, writer = actions.edges.saved[stage, m], actions.blueprint, actions.writer
    following = (segment, c - 1) if c else (segment - 1, blueprint.options.num_slices - 1)
    for index, slice_number in ((segment, c), following):
        if (index, slice_number) not in saved:
            continue
        name, fetched_piece, entry = blueprint.segments[index].name, Piece(m, slice_number), saved[index, slice_number]
        entry.x, entry.kept = (waiting.fetched(writer, name, fetched_piece) for waiting in (entry.x, entry.kept))
        for earlier in blueprint.past(index, fetched_piece):
            past = saved[index, earlier.slice]
            past.carried = past.carried.fetched(writer, name, earlier)
    return saved[segment, c]


def _primals(actions: Actions, stage: int, segment: int, piece: Piece, params: list[int]) -> list[int]:
    """The operands of a slice's forward: parameters, x, what past slices carried over, context."""
    saved = actions.edges.saved[stage, piece.microbatch]
    past = [v for earlier in actions.blueprint.past(segment, piece) for v in saved[segment, earlier.slice].carried.values]
    return [*params, *saved[segment, piece.slice].x.values, *past, *actions.contexts.read_by(segment, piece)]


def _write_segment(actions: Actions, stage: int, segment: int, piece: Piece, primals: list[int]) -> list[int]:
    """Write the whole backward of one slice of a segment, or its forward and backward as one; see `WriteSegment`."""
    blueprint, code, reported = actions.blueprint, actions.blueprint.codes[segment][piece.slice], actions.reported
    name, paths = blueprint.segments[segment].name, blueprint.trained_paths(segment)
    saved = actions.edges.saved[stage, piece.microbatch].pop((segment, piece.slice))
    assert saved.dy is not None
    names = [*(f"d {path}.mb{blueprint.piece_name(piece)}" for path in paths), *_gradient_names(actions, segment, piece)]
    if code.joint is not None and actions.position.is_joint(segment, stage, piece.microbatch):
        report_names = reported.names(segment, piece)
        out = actions.writer.emit("backward", code.joint, [*primals, *saved.dy], [*report_names, *names], name, piece)
        found, out = out[: len(report_names)], out[len(report_names) :]
        reported.take(segment, piece, found)
        actions.joint_reports.update({v: SegmentResult(name, piece, n) for n, v in enumerate(found)})
    else:
        assert code.backward is not None
        operands = [*(primals[i] for i in code.reads), *saved.kept.values, *saved.dy]
        out = actions.writer.emit("backward", code.backward, operands, names, name, piece)
    actions.gradients.take(stage, segment, out[: len(paths)], piece)
    return out[len(paths) :]


def _write_input_half(actions: Actions, stage: int, segment: int, piece: Piece, primals: list[int]) -> list[int]:
    """Write I for one slice of a segment, and save the values that cross to W; see `WriteSegment`."""
    blueprint, code = actions.blueprint, actions.blueprint.codes[segment][piece.slice]
    split, saved = split_segment(code), actions.edges.saved[stage, piece.microbatch][segment, piece.slice]
    assert saved.dy is not None
    operands = [
        *(primals[i] for i in split.input_reads),
        *(saved.kept.values[i] for i in split.input_kept),
        *(saved.dy[i] for i in split.input_cotangents),
    ]
    crossing = (f"c{segment}.{blueprint.piece_name(piece)}.{i}" for i in range(split.num_crossing))
    names = [*_gradient_names(actions, segment, piece), *crossing]
    out = actions.writer.emit("backward_input", split.input, operands, names, blueprint.segments[segment].name, piece)
    num_gradients = len(code.traced.active_x)
    saved.crossing = out[num_gradients:]
    return out[:num_gradients]


def _gradient_names(actions: Actions, segment: int, piece: Piece) -> list[str]:
    """Names for the gradients of x and of what past slices carried over."""
    blueprint = actions.blueprint
    of_x = [f"dx{segment}.{blueprint.piece_name(piece)}"] * len(blueprint.placement.segments.active[segment][piece.slice])
    return of_x + [
        f"dcarried{segment}.{blueprint.piece_name(earlier)}"
        for earlier in blueprint.past(segment, piece)
        for _ in range(blueprint.num_active_carried(segment, earlier.slice))
    ]
