"""Forward: the instructions of a stage's forward with a microbatch, segment by segment and in each segment slice by slice."""

from collections.abc import Iterator, Sequence

from mpar.compiler.build._actions import Actions
from mpar.compiler.build._waiting import Saved, Waiting
from mpar.compiler.segment import SegmentCode
from mpar.ir import Piece, SegmentResult

__all__ = ["write_forward"]


def write_forward(actions: Actions, stage: int, microbatches: Sequence[int]) -> Iterator[None]:
    """Write the forward of a stage, in each segment microbatch by microbatch; pauses behind each segment."""
    edges = actions.edges
    for microbatch in microbatches:
        actions.contexts.of(Piece(microbatch, 0))
        edges.saved.setdefault((stage, microbatch), {})
    xs = {m: edges.inputs.pop((stage, m), edges.nothing()) for m in microbatches}
    for segment in actions.segments_of(stage):
        joint = [m for m in microbatches if actions.position.is_joint(segment, stage, m)]
        for microbatch in microbatches:
            if microbatch in joint:  # its forward is written together with its backward
                edges.saved[stage, microbatch] |= {(segment, c): Saved(x) for c, x in enumerate(xs[microbatch])}
                xs[microbatch] = edges.nothing()
            else:
                xs[microbatch] = _write_segment(actions, stage, segment, microbatch, xs[microbatch])
        if len(joint) < len(microbatches):
            actions.gathers.next_use()
            yield
    for microbatch in microbatches:
        edges.outputs[stage, microbatch] = xs[microbatch]
        if actions.position.runs(stage + 1, microbatch):
            edges.inputs[stage + 1, microbatch] = xs[microbatch]


def _write_segment(actions: Actions, stage: int, segment: int, microbatch: int, xs: list[Waiting]) -> list[Waiting]:
    """Write the forward of all slices of a segment; returns what each gives to the next segment."""
    blueprint, writer = actions.blueprint, actions.writer
    name, num_x = blueprint.segments[segment].name, blueprint.num_entering(segment + 1)
    ends_stage = segment == actions.segments_of(stage)[-1]
    params, fetched = actions.gathers.parameters(blueprint.segments[segment].paths, microbatch), list(xs)
    ys: list[Waiting] = []
    carried: dict[Piece, list[int]] = {}
    for piece, code in zip(blueprint.pieces(microbatch), blueprint.codes[segment], strict=True):
        actions.fetch(fetched, segment, microbatch, (piece.slice, piece.slice + 1))
        past = [v for earlier in blueprint.past(segment, piece) for v in carried[earlier]]
        x = [*fetched[piece.slice].values, *past, *actions.state.get(segment, ())]
        operands = [*params, *x, *actions.contexts.read_by(segment, piece)]
        out = writer.emit("forward", code.forward, operands, _result_names(actions, segment, piece, code), name, piece)
        num_out, num_results = len(code.traced.x_out), code.traced.num_results
        if segment in actions.state:
            actions.state[segment] = out[num_x:num_out]
        else:
            carried[piece] = out[num_x:num_out]
        actions.carried.update({v: SegmentResult(name, piece, n) for n, v in enumerate(carried.get(piece, ()))})
        if blueprint.placement.segments.has_backward(segment):
            saved = Saved(_read(xs[piece.slice], code), Waiting(out[num_results:]), Waiting(carried.get(piece, ())))
            if blueprint.options.recompute.offload:
                saved = saved.offloaded(writer, name, piece)
            actions.edges.saved[stage, microbatch][segment, piece.slice] = saved
        ys.append(actions.until_next_segment(out[:num_x], segment, piece, ends_stage=ends_stage))
        actions.reported.take(segment, piece, out[num_out:num_results])
    return ys


def _read(x: Waiting, code: SegmentCode) -> Waiting:
    """The leaves of the x of a segment that its backward reads."""
    first = code.traced.num_params
    return Waiting([v if first + i in code.reads else -1 for i, v in enumerate(x.values)], on_host=x.on_host)


def _result_names(actions: Actions, segment: int, piece: Piece, code: SegmentCode) -> list[str]:
    """Names for the results of a forward: x, state or what it carries to later slices, losses and metrics, kept values."""
    blueprint, piece_name = actions.blueprint, actions.blueprint.piece_name(piece)
    num_out, num_x = len(code.traced.x_out), blueprint.num_entering(segment + 1)
    carried = [f"carried{segment}.{piece_name}"] * (num_out - num_x)
    state = [f"{actions.writer.values[v].name}'" for v in actions.state.get(segment, ())]
    names = [*[f"x{segment + 1}.{piece_name}"] * num_x, *(state or carried)]
    return [*names, *actions.reported.names(segment, piece), *(f"r{segment}.{piece_name}.{i}" for i in range(code.num_kept))]
