"""Build: one list of instructions for each position along pp, from a chain, its microbatches and an optimizer.

On a rank a step first computes the weights of all microbatches. Then come the actions of the schedule, forwards and backwards
segment by segment, with messages to other stages between them; gradients are reduced after their last contribution. Metrics and
losses, the gradient norm and the update end the step.
"""

from dataclasses import replace

from mpar.chain import Chain
from mpar.compiler.build._batch import microbatch_shape, piece_values
from mpar.compiler.build._blueprint import Blueprint
from mpar.compiler.build._functions import Functions
from mpar.compiler.build._options import BatchShape, CompileOptions
from mpar.compiler.build._order import Ordered, hide_communication, peak_bytes, usable_bytes
from mpar.compiler.build._part import write_part
from mpar.compiler.build._pipeline import make_pipeline
from mpar.compiler.build._placement import place
from mpar.compiler.build._values import Values
from mpar.compiler.build._writer import Kinds, Writer
from mpar.compiler.segment import check_names
from mpar.errors import ConfigError
from mpar.forecast import instruction_durations
from mpar.hardware import Hardware
from mpar.ir import HOME, Facts, Part, ProgramData, queues_on_streams
from mpar.mesh import Mesh
from mpar.optimizer import Optimizer
from mpar.strategy import Strategy

__all__ = ["build"]

_HOPELESS = 2  # times the memory of a device: what needs more hardly fits without hiding messages either


def build(
    model: Chain,
    optimizer: Optimizer | None,
    mesh: Mesh,
    strategy: Strategy,
    batch_shape: BatchShape,
    options: CompileOptions,
) -> ProgramData:
    """Place the model on the mesh, find the schedule, and write the part of every position along pp.

    Messages inside segments are hidden, unless the memory of the device suffices only without that. Instructions stay joined if
    a step is predicted to take no longer.

    optimizer: None leaves out the norm and the update. Raises ShardingError, ShapeError or ConfigError, listing all offenders.
    """
    batch = piece_values(model, batch_shape, options.num_microbatches, options.num_slices)
    placement = place(model, strategy, mesh, batch, options)
    check_names(options.recompute, (code.ranked.graph for slices in placement.segments.by_segment for code in slices))
    pipeline = make_pipeline(model, placement, options)
    if not options.differentiable and any(len(copies) > 1 for copies in pipeline.positions.values()):
        raise ConfigError(
            f"cannot keep state by schedule {options.schedule.name!r}: it has two copies of a stage, and state exists once. "
            "Use another schedule."
        )
    blueprint = Blueprint(model, optimizer, options, placement, pipeline)
    values, kinds = Values(placement.mesh), Kinds()
    functions = Functions(placement.target, values)
    has_slices = options.num_slices > 1
    parts = [
        write_part(blueprint, Writer(values, functions, kinds, has_slices), position)
        for position in range(placement.mesh.axis_size("pp"))
    ]
    joined, alone = (_program(blueprint, values, kinds, list(form), mesh) for form in zip(*parts, strict=True))
    program, fits = _shortest(joined, alone, options)
    if fits:
        return program
    as_written = build(model, optimizer, mesh, strategy, batch_shape, replace(options, hides_inside=False))
    return program if peak_bytes(as_written) > usable_bytes(options.profile) else as_written


def _program(blueprint: Blueprint, values: Values, kinds: Kinds, parts: list[Part], mesh: Mesh) -> ProgramData:
    """The program of these parts; `mesh` is the one that the caller gave."""
    used = {instruction.kind for part in parts for instruction in part.instructions}
    return ProgramData(
        mesh=blueprint.placement.mesh,
        values=values.values,
        kinds={name: kind for name, kind in kinds.kinds.items() if name in used},
        parts=parts,
        num_microbatches=blueprint.options.num_microbatches,
        schedule=[list(actions) for actions in blueprint.pipeline.table],
        facts=_facts(blueprint, kinds, mesh),
        order_parts=blueprint.placement.order_parts,
        num_slices=blueprint.options.num_slices,
    )


def _shortest(joined: ProgramData, alone: ProgramData, options: CompileOptions) -> tuple[ProgramData, bool]:
    """The program with joined instructions or that without, with its communication hidden, and whether it fits into memory.

    It is the one that fits; if both do, the shorter by prediction: other queues wait until all that was joined is done. None is
    shorter than its computation.
    """
    first = hide_communication(joined, options.hardware, options.prefetch_bytes)
    fits = not _needs_too_much(joined, first, options)
    if first is None or not any(instruction.members for part in joined.parts for instruction in part.instructions):
        return joined, fits
    if fits and first.makespan <= _computation(alone, options.profile):
        return joined, True
    second = hide_communication(alone, options.hardware, options.prefetch_bytes)
    alone_fits = not _needs_too_much(alone, second, options)
    if second is not None and (not alone_fits, second.makespan) < (not fits, first.makespan):
        return alone, alone_fits
    return joined, fits


def _computation(program: ProgramData, hardware: Hardware) -> float:
    """The longest time that any rank computes."""
    busy = []
    for part, durations in zip(program.parts, instruction_durations(program, hardware), strict=True):
        queues = queues_on_streams(part.instructions, program.kinds)
        busy.append(sum(seconds for seconds, queue in zip(durations, queues, strict=True) if queue == HOME))
    return max(busy)


def _needs_too_much(program: ProgramData, ordered: Ordered | None, options: CompileOptions) -> bool:
    """Whether a program whose messages are hidden inside segments needs somewhat more memory than the device has."""
    if options.hides_for is None:
        return False
    limit = usable_bytes(options.hides_for)
    return limit < (peak_bytes(program) if ordered is None else ordered.peak_bytes) <= _HOPELESS * limit


def _facts(blueprint: Blueprint, kinds: Kinds, mesh: Mesh) -> Facts:
    """What people, ranks and proofs need to know of the compilation; `mesh` is the one that the caller gave."""
    placement, options, strategy = blueprint.placement, blueprint.options, blueprint.placement.strategy
    shares_sequences = placement.mesh.axis_size(strategy.compute.get("seq", ())) > 1
    return Facts(
        optimizer=blueprint.optimizer,
        mesh=mesh,
        strategy=strategy.name,
        context_parallel=strategy.context_parallel if shares_sequences else None,
        refused=placement.refused,
        reduce="each" if strategy.reduces_each else "last",
        batch={key: microbatch_shape(x, options.num_slices) for key, x in placement.batch.items() if x.ndim > 1},
        recompute=options.recompute.kind,
        kernels=options.chosen_kernels,
        schedule=options.schedule.name if options.schedule.table is None else "table",
        stage_of={
            blueprint.segments[index].name: stage
            for stage, segments in enumerate(blueprint.pipeline.ranges)
            for index in segments
        },
        fallbacks=tuple(sorted({op for code in kinds.codes.values() for op in code.fallbacks})),
        frozen=tuple(sorted(blueprint.model.frozen)),
        stands_for=dict(blueprint.model.stands_for),
    )
