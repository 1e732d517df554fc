"""Compile a training or evaluation program. Importing this loads the compiler, which importing `mpar.program` does not."""

from mpar.chain import Chain, check_chain
from mpar.check_optimizer import check_optimizer
from mpar.compiler import BUCKET_BYTES, BatchShape, CompileOptions, RecomputePolicy, Schedule, build, policy
from mpar.errors import ConfigError
from mpar.hardware import Hardware
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.optimizer import Optimizer
from mpar.precision import Precision
from mpar.precision import precision as make_precision
from mpar.program._program import Program
from mpar.strategy import Strategy, preset

__all__ = ["compile_eval", "compile_forward", "compile_step"]


def compile_step(
    model: Chain,
    optimizer: Optimizer,
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
    prefetch_bytes: int | None = None,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile one training step: forward, backward, reduction, clipping and update, for every rank of `mesh`.

    batch_shape:    (B, S) of the tokens and labels of the global batch, all microbatches together; or for each batch key its
                    shape and dtype.
    schedule:       the order in which microbatches pass the stages along pp: a name of mpar.schedules or a Schedule; None: 1F1B.
    num_slices:     the number of equal parts of a microbatch's rows, which every segment computes one after the other (Yao et
                    al. 2024, arXiv:2408.16978). The mathematics is the same. With recompute="full" the values that a segment
                    makes take the memory of one part. Without it, what is kept hardly shrinks, and it grows if keys are computed
                    from latents again.
    precision:      "fp32", "bf16" or a Precision. recompute: none, full, selective, budget, or a RecomputePolicy.
    bucket_bytes:   gathers and reductions of neighbouring units are joined into collectives of at most this size.
    prefetch_bytes: gathers that make at most this many bytes are issued one group early, to overlap with its computation; None:
                    those for which the device has memory, if `hardware` is given and runs both at the same time.
    hardware:       the profile by which stages are balanced, messages are placed and an `auto` schedule is found; None: that of
                    a typical accelerator. If it is given and overlaps, communication is hidden by its times; see also
                    `Schedule.paired`.
    kernels:        the chip for which kernels are chosen, and how; None: the best for the chip of `hardware`.
    Raises ShardingError, ShapeError or ConfigError, listing all problems.
    """
    check_optimizer(optimizer)
    options = CompileOptions(
        training=True,
        schedule=schedule if isinstance(schedule, Schedule) else Schedule(schedule or "one_f_one_b"),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        precision=make_precision(precision),
        recompute=recompute if isinstance(recompute, RecomputePolicy) else policy(recompute),
        bucket_bytes=bucket_bytes,
        prefetch_bytes=prefetch_bytes,
        hardware=hardware,
        kernels=kernels,
    )
    return _compile(model, optimizer, mesh, strategy, batch_shape, options)


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
    prefetch_bytes: int | None = None,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile the loss of a batch without its gradient: the forwards of `schedule`, with the same stages as in training.

    The arguments are those of `compile_step`. The state of the program is the parameters alone, which it does not change; its
    metrics are loss, microbatch_losses, weight, side losses and the metrics of segments.
    """
    options = CompileOptions(
        training=False,
        schedule=schedule if isinstance(schedule, Schedule) else Schedule(schedule or "forward_only"),
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        precision=make_precision(precision),
        recompute=policy("full"),  # nothing is kept for a backward
        bucket_bytes=bucket_bytes,
        prefetch_bytes=prefetch_bytes,
        hardware=hardware,
        kernels=kernels,
    )
    return _compile(model, None, mesh, strategy, batch_shape, options)


def compile_forward(
    model: Chain,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    *,
    schedule: Schedule | str | None = None,
    precision: Precision | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int | None = None,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile the forwards of a chain without losses: what its last segment returns as x is the result, on every rank.

    Segments may keep state from step to step (`Segment.state`). It lies where `state_axes` and the strategy place it, is part of
    the program's state under paths that begin with `state.`, zero at first, and is overwritten in place. The other arguments are
    those of `compile_step`. The metrics of the program are the leaves of x, by their paths, and the metrics of segments.
    Raises ShardingError, ShapeError or ConfigError, listing all problems.
    """
    options = CompileOptions(
        training=False,
        differentiable=False,
        schedule=schedule if isinstance(schedule, Schedule) else Schedule(schedule or "forward_only"),
        precision=make_precision(precision),
        recompute=policy("full"),  # nothing is kept for a backward
        bucket_bytes=bucket_bytes,
        prefetch_bytes=prefetch_bytes,
        hardware=hardware,
        kernels=kernels,
    )
    return _compile(model, None, mesh, strategy, batch_shape, options)


def _compile(
    model: Chain,
    optimizer: Optimizer | None,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    options: CompileOptions,
) -> Program:
    """Build the program and verify it."""
    check_chain(model, trains=optimizer is not None)
    stateful = [segment.name for segment in model.segments if segment.state]
    if stateful and options.differentiable:
        raise ConfigError(
            f"cannot compute losses of {type(model).__name__}: its segments {stateful} keep state from step to step, which has "
            "no gradient.\nUse compile_forward."
        )
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    program = Program.of(build(model, optimizer, mesh, strategy, batch_shape, options))
    program.verify()
    return program
