"""Build: the chain, the microbatches and the optimizer become one list of instructions.

The order of a step on a rank: weights of all microbatches; the actions of its schedule, segment by segment forward or backward,
with messages to other stages between them; gradient reduction after the last use; metrics; norm; update.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from mpar import tree
from mpar.arrange import CONTEXT_PARALLEL, arrange, check_sequence, num_order_parts
from mpar.chain import CONTEXT_OF_PAST, Carry, Chain, Segment, is_axes, of_past
from mpar.errors import ConfigError, ShapeError, ShardingError
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.precision import Precision, precision
from mpar.program._part import write_part
from mpar.program._partition import RecomputePolicy, policy
from mpar.program._predict import REFERENCE, Hardware, segment_time
from mpar.program._program import Program
from mpar.program._segments import Code, SegmentCode, Slices, compile_function, compile_segment, trace_segment
from mpar.program._stages import Schedule, make_pipeline
from mpar.program._step import Step
from mpar.program._units import Unit, make_units
from mpar.program._writer import Writer, like
from mpar.spec import P
from mpar.strategy import Strategy, preset

__all__ = ["compile_eval", "compile_step"]

BUCKET_BYTES = 32 * 2**20  # gathers and reductions of units are joined up to this size: beyond it, bandwidth hides latency
BatchShape = tuple[int, ...] | Mapping[str, tuple[tuple[int, ...], torch.dtype]]
make_precision = precision  # `compile_step` has a parameter of that name


def compile_step(
    model: Chain,
    optimizer: Any,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    *,
    schedule: Schedule | str | None = None,
    num_microbatches: int = 1,
    num_slices: int = 1,
    precision: Precision | str | None = None,
    recompute: RecomputePolicy | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int = 0,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile one training step: forward, backward, reduction, clipping and update, for every rank of `mesh`.

    batch_shape:    (B, S) of the global batch, all microbatches together, of tokens and labels; or for each batch key its shape
                    and dtype.
    schedule:       how microbatches go through the stages of `mesh.pp`: a name of mpar.schedules or a Schedule; None: 1F1B.
    num_slices:     parts of a microbatch's rows, equally long, which each segment takes one after the other (Yao et al. 2024,
                    arXiv:2408.16978): the mathematics is the same, and with recompute="full" memory for what a segment makes is
                    that of one part. Without, what is kept hardly shrinks, and grows where keys are made of latents again.
    precision:      "fp32", "bf16" or a Precision. recompute: none, full, selective, budget, or a RecomputePolicy.
    bucket_bytes:   gathers and reductions of neighbouring units are joined into messages up to this size.
    prefetch_bytes: gathers that make at most this much are issued one group early, to overlap with its computation.
    hardware:       whose costs balance stages, place messages and find an `auto` schedule; None: a typical accelerator's.
    kernels:        the chip that kernels are chosen for, and how; None: the best for that of `hardware`.
    Raises ShardingError, ShapeError or ConfigError, listing all offenders.
    """
    recompute = recompute if isinstance(recompute, RecomputePolicy) else policy(recompute)
    schedule = Schedule(schedule) if isinstance(schedule, str) else schedule or Schedule()
    sizes, bytes_ = (num_microbatches, num_slices), (bucket_bytes, prefetch_bytes)
    return _compile(
        model, optimizer, mesh, strategy, batch_shape, schedule, sizes, precision, recompute, bytes_, hardware, kernels
    )


def compile_eval(
    model: Chain,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    *,
    schedule: Schedule | str | None = None,
    num_microbatches: int = 1,
    num_slices: int = 1,
    precision: Precision | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int = 0,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile the loss of a batch without its gradient: the forwards of `schedule`, on stages that lie where training has them.

    Arguments are those of `compile_step`. The program's state is the parameters alone, which a step leaves as they are; its
    metrics are loss, microbatch_losses, weight, other losses and what segments report.
    """
    schedule = Schedule(schedule or "forward_only") if schedule is None or isinstance(schedule, str) else schedule
    sizes, bytes_ = (num_microbatches, num_slices), (bucket_bytes, prefetch_bytes)
    nothing_kept = policy("full")
    return _compile(model, None, mesh, strategy, batch_shape, schedule, sizes, precision, nothing_kept, bytes_, hardware, kernels)


def _compile(
    model: Chain,
    optimizer: Any | None,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    schedule: Schedule,
    sizes: tuple[int, int],
    precision: Precision | str | None,
    recompute: RecomputePolicy,
    bytes_: tuple[int, int],
    hardware: Hardware | None,
    kernels: Kernels | None,
) -> Program:
    public_mesh, (bucket_bytes, prefetch_bytes), (num_microbatches, num_slices) = mesh, bytes_, sizes
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    batch = _piece_values(model, batch_shape, num_microbatches, num_slices)
    numbers = make_precision(precision)
    kernels = kernels or Kernels(arch=hardware.arch if hardware else None)
    placed = _place(model, strategy, mesh, batch, num_slices, numbers, recompute, kernels, hardware or REFERENCE)
    strategy, mesh, batch = placed.strategy, placed.mesh, placed.batch
    writer, units, codes = placed.writer, placed.units, placed.codes
    names = [segment.name for segment in model.segments]
    pipeline = make_pipeline(
        schedule, mesh, num_microbatches, names, codes, hardware or REFERENCE, backward=optimizer is not None
    )
    step = Step(
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        mesh=mesh,
        precision=numbers,
        batch=batch,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        bucket_bytes=bucket_bytes,
        prefetch_bytes=prefetch_bytes,
        offload=recompute.offload,
        writer=writer,
        units=units,
        context_code=placed.context,
        weight_code=placed.weight,
        codes=codes,
        reach=[_reach(segment, _length(batch)) if num_slices > 1 else 0 for segment in model.segments],
        boundary=placed.boundary,
        pipeline=pipeline,
    )
    program = Program(
        mesh=mesh,
        values=writer.values,
        kinds=writer.kinds,
        parts=[write_part(step, position) for position in range(mesh.axis_size("pp"))],
        num_microbatches=num_microbatches,
        schedule=[list(own) for own in pipeline.table],
        order_parts=placed.order_parts,
        num_slices=num_slices,
        info={
            "optimizer": optimizer,
            "public_mesh": public_mesh,
            "strategy": strategy.name,
            "context_parallel": strategy.context_parallel if mesh.axis_size(strategy.compute.get("seq", ())) > 1 else None,
            "refused": placed.refused,
            "reduce": "each" if strategy.reduces_each else "last",
            "batch": {key: _of_microbatch(value, num_slices) for key, value in batch.items()},
            "recompute": recompute.kind,
            "kernels": kernels,
            "schedule": schedule.name if schedule.table is None else "table",
            "stage_of": {names[index]: stage for stage, own in enumerate(pipeline.ranges) for index in own},
            "fallbacks": sorted({op for code in writer.codes.values() for op in code.fallbacks}),
        },
    )
    program.verify()
    return program


@dataclass(frozen=True)
class _Placed:
    """A model on a mesh: the strategy and mesh as they were arranged for it, and all of its code."""

    strategy: Strategy
    mesh: Mesh
    batch: dict[str, Tensor]
    order_parts: int
    writer: Writer
    units: dict[str, Unit]
    context: Code
    weight: Code
    codes: list[Slices]
    boundary: list[list[tuple[Tensor, P]]]
    refused: tuple[str, ...] = ()  # ways to divide attention that were tried, and cannot be


def _of_microbatch(x: Tensor, num_slices: int) -> tuple[int, ...]:
    """The shape of a batch entry of a whole microbatch."""
    return (*x.shape[:-1], num_slices * x.shape[-1])


def _length(batch: Mapping[str, Tensor]) -> int:
    """Positions of the rows of a batch."""
    return next(x.shape[1] for x in batch.values() if x.ndim > 1)


def _reach(segment: Segment, length: int) -> int:
    """How many slices, of so many positions each, before its own one a segment reads."""
    if segment.carry is None:
        return 0
    reach = segment.carry.reach
    return sys.maxsize if reach is None else -(-(reach - 1) // length)  # its first position sees reach - 1 before it


def _place(
    model: Chain,
    strategy: Strategy,
    mesh: Mesh,
    batch: dict[str, Tensor],
    num_slices: int,
    precision: Precision,
    recompute: RecomputePolicy,
    kernels: Kernels,
    hardware: Hardware,
) -> _Placed:
    """Compile the segments; of the ways to divide attention (context_parallel "auto") the one with the least predicted time."""
    how = (mesh, batch, num_slices, precision, recompute, kernels)
    shared = mesh.axis_size(strategy.compute.get("seq", ())) > 1
    if strategy.context_parallel != "auto" or not shared:
        return _place_as_said(model, strategy, *how)
    found: list[_Placed] = []
    refused: dict[str, Exception] = {}
    for method in CONTEXT_PARALLEL:
        try:
            found.append(_place_as_said(model, replace(strategy, context_parallel=method), *how))
        except (ConfigError, ShapeError, ShardingError) as error:
            refused[method] = error
    if not found:
        raise next(iter(refused.values()))

    def time(placed: _Placed) -> float:
        codes = (code for slices in placed.codes for code in slices)
        kinds = (kind for code in codes for kind in (code.forward.kind, code.backward.kind))
        return sum(segment_time(kind, placed.mesh, hardware) for kind in kinds)

    return replace(min(found, key=time), refused=tuple(refused))


def _place_as_said(
    model: Chain,
    strategy: Strategy,
    mesh: Mesh,
    batch: dict[str, Tensor],
    num_slices: int,
    precision: Precision,
    recompute: RecomputePolicy,
    kernels: Kernels,
) -> _Placed:
    strategy, mesh = arrange(strategy, mesh, model.abstract_params, model.param_axes)
    batch = dict(batch)
    order_parts = _order_sequence(model, strategy, mesh, batch, num_slices)
    shapes = {key: (tuple(value.shape), model.batch_axes[key]) for key, value in batch.items()}
    strategy.check(mesh, model.abstract_params, model.param_axes, shapes)
    writer = Writer(mesh, strategy.compute, kernels, num_slices)
    units = make_units(model, strategy, mesh, precision)
    specs = [strategy.compute_spec(model.batch_axes[key], mesh) for key in batch]
    how: dict[str, Any] = {"table": strategy.compute, "kernels": kernels}
    make_context: Callable = model.context
    if num_slices > 1:
        make_context = functools.partial(cast(Any, model).context, row_length=num_slices * _length(batch))
    context = compile_function("context", make_context, (batch,), mesh, specs, resolve=True, **how)
    weight = compile_function("weight", model.weight, (batch,), mesh, specs, **how)
    compiler = _SegmentCompiler(model, strategy, mesh, precision, recompute, kernels, units, num_slices, _length(batch))
    codes, boundary = compiler.compile_all(writer.global_results(context), context.out_specs)
    return _Placed(strategy, mesh, batch, order_parts, writer, units, context, weight, codes, boundary)


def _piece_values(model: Chain, batch_shape: BatchShape, num_microbatches: int, num_slices: int) -> dict[str, Tensor]:
    """Values without data of one slice of a microbatch."""
    if not isinstance(batch_shape, Mapping):
        batch_shape = {key: (tuple(batch_shape), torch.int64) for key in ("tokens", "labels")}
    unknown = sorted(set(batch_shape) - set(model.batch_axes))
    if unknown:
        raise ConfigError(f"batch keys {unknown} are not read by the model, which knows {sorted(model.batch_axes)}")
    shapes = {key: tuple(shape) for key, (shape, _) in batch_shape.items()}
    if any(len(shape) != 2 or min(shape) < 1 for shape in shapes.values()):
        raise ShapeError(f"cannot compile for a batch of {shapes}: every shape must be (B, S) with positive sizes")
    rows = {key: shape[0] for key, shape in shapes.items()}
    if not isinstance(num_microbatches, int) or num_microbatches < 1 or any(n % num_microbatches for n in rows.values()):
        raise ShapeError(f"cannot cut a batch of {rows} rows into {num_microbatches} equal microbatches")
    whole = getattr(model, "whole_step", None)
    if num_microbatches > 1 and whole is not None:
        raise ConfigError(f"cannot cut a step into {num_microbatches} microbatches: {whole}")
    lengths = {key: shape[1] for key, shape in shapes.items()}
    if not isinstance(num_slices, int) or num_slices < 1 or any(n % num_slices for n in lengths.values()):
        found = " and ".join(f"{n:,}" for n in sorted(set(lengths.values())))
        raise ShapeError(
            f"cannot cut rows of {found} positions into {num_slices} equal slices.\n"
            f"Use a num_slices that divides {found} (schedule.num_slices in a configuration); 1 leaves rows whole."
        )
    whole = getattr(model, "whole_rows", "it does not say what its segments leave from one slice to the next (whole_rows).")
    if num_slices > 1 and whole is not None:
        raise ConfigError(
            f"cannot cut the rows of this model into {num_slices} slices: {whole}\n"
            "num_slices=1 (schedule.num_slices in a configuration) leaves rows whole."
        )
    return {
        key: torch.empty((shape[0] // num_microbatches, shape[1] // num_slices), dtype=dtype, device="meta")
        for key, (shape, dtype) in batch_shape.items()
    }


def _order_sequence(model: Chain, strategy: Strategy, mesh: Mesh, batch: dict[str, Tensor], num_slices: int) -> int:
    """In how many parts sequences are dealt out to the ranks that share them; their order becomes an entry of the batch.

    So it does where rows are cut: a slice would not know else where it begins.
    """
    lengths = {x.shape[1] for x in batch.values()}
    for length in lengths:
        check_sequence(strategy, mesh, length, dealt="order" in model.batch_axes, num_slices=num_slices)
    shared = mesh.axis_size(strategy.compute.get("seq", ())) > 1
    if "order" not in model.batch_axes or (not shared and num_slices == 1):
        return 1
    (length,) = lengths
    batch["order"] = torch.empty(length, dtype=torch.int64, device="meta")
    return num_order_parts(strategy, mesh) if shared else 1


@dataclass(frozen=True)
class _Slice:
    """A segment's function for slices that read `num_past` others; of the last slice nothing is left."""

    carry: Carry
    num_past: int
    last: bool

    def __call__(self, params: tuple, x: Any, context: Any) -> tuple:
        x, *past = x
        x, left, *rest = self.carry.fn(params, x, context, tuple(past))
        return (x,) if self.last else (x, left), *rest


@dataclass
class _SegmentCompiler:
    """Compiles the segments of a chain. One compilation for each kind: equal functions on equal values are one."""

    model: Chain
    strategy: Strategy
    mesh: Mesh
    precision: Precision
    recompute: RecomputePolicy
    kernels: Kernels
    units: Mapping[str, Unit]
    num_slices: int
    length: int
    done: dict[Any, SegmentCode] = field(default_factory=dict)

    def compile_all(
        self, context: Mapping[str, Tensor], context_specs: Sequence[P]
    ) -> tuple[list[Slices], list[list[tuple[Tensor, P]]]]:
        """Every segment's code, slice by slice, and what enters it."""
        codes: list[Slices] = []
        x: Any = None
        x_specs: list[P] = []
        boundary: list[list[tuple[Tensor, P]]] = [[]]
        for segment in self.model.segments:
            if self.num_slices == 1 or segment.carry is None or _reach(segment, self.length) == 0:
                code = self.compile(segment, x, x_specs, context, context_specs)
                slices = (code,) * self.num_slices
                x = tree.unflatten(code.traced.x_structure, code.traced.x_out) if code.traced.x_out else None
            else:
                slices = self.compile_slices(segment, segment.carry, x, x_specs, context, context_specs)
                code = slices[-1]  # of which nothing is left
                (x,) = tree.unflatten(code.traced.x_structure, code.traced.x_out)
            x_specs = list(code.forward.out_specs[: len(code.traced.x_out)])
            boundary.append(list(zip(code.forward.out_values[: len(x_specs)], x_specs, strict=True)))
            codes.append(slices)
        return codes, boundary

    def compile_slices(
        self,
        segment: Segment,
        carry: Carry,
        x: Any,
        x_specs: list[P],
        context: Mapping[str, Tensor],
        context_specs: Sequence[P],
    ) -> Slices:
        """The code of a segment for each slice: its x is that of the slice, then what past slices left."""
        slices: list[SegmentCode] = []
        specs = dict(zip(context, context_specs, strict=True))
        left: Any = None
        left_specs: list[P] = []
        own = [key for key in CONTEXT_OF_PAST if key in context]
        for c in range(self.num_slices):
            num_past, last = min(c, _reach(segment, self.length)), c + 1 == self.num_slices
            more = {of_past(key, i): key for i in range(num_past) for key in own}
            part = replace(
                segment,
                fn=_Slice(carry, num_past, last),
                out_axes=(segment.out_axes,) if last else (segment.out_axes, carry.axes),
            )
            code = self.compile(
                part,
                (x, *[left] * num_past),
                [*x_specs, *left_specs * num_past],
                {**context, **{name: context[key] for name, key in more.items()}},
                [*context_specs, *(specs[key] for key in more.values())],
            )
            if not last:
                y, left = tree.unflatten(code.traced.x_structure, code.traced.x_out)
                left_specs = list(code.forward.out_specs[len(tree.leaves(y)) : len(code.traced.x_out)])
            slices.append(code)
        return tuple(slices)

    def compile(
        self, segment: Segment, x: Any, x_specs: list[P], context: Mapping[str, Tensor], context_specs: Sequence[P]
    ) -> SegmentCode:
        """The code of a segment for an x that looks like this one."""
        read = [self.units[path] for path in segment.paths]
        grad_dtypes = [self.precision.grad_dtype(leaf.dtype) for unit in read for _, leaf in unit.leaves]
        traced = trace_segment(segment, [_in_use(self.model, unit) for unit in read], x, context, grad_dtypes)
        specs = [spec for unit in read for spec in unit.compute]
        out_specs = _out_specs(segment, len(traced.x_out), self.strategy, self.mesh)
        key = (id(traced), tuple(specs), tuple(x_specs), tuple(out_specs))
        if key not in self.done:
            name = segment.name.split(".")[0]
            where = (specs, x_specs, context_specs, out_specs)
            self.done[key] = compile_segment(name, traced, self.mesh, self.strategy, *where, self.recompute, self.kernels)
        return self.done[key]


def _in_use(model: Chain, unit: Unit) -> Any:
    """The subtree of a unit without data, in the dtypes in which it is used."""
    structure = tree.flatten(tree.get(model.abstract_params, unit.path))[1]
    return tree.unflatten(
        structure, [like(leaf, dtype) for (_, leaf), dtype in zip(unit.leaves, unit.compute_dtypes, strict=True)]
    )


def _out_specs(segment: Segment, num_leaves: int, strategy: Strategy, mesh: Mesh) -> list[P]:
    axes = tree.leaves(segment.out_axes, is_leaf=is_axes)
    return [strategy.compute_spec(a, mesh) for a in axes] if num_leaves else []
