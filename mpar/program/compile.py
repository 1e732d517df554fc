"""Compile a training or evaluation step to a program. This loads the compiler, which `mpar.program` itself does not."""

from mpar.chain import Chain, check_chain
from mpar.compiler import BUCKET_BYTES, BatchShape, CompileOptions, RecomputePolicy, Schedule, build, policy
from mpar.hardware import Hardware
from mpar.kernels import Kernels
from mpar.mesh import Mesh
from mpar.optimizer import Optimizer, check_optimizer
from mpar.precision import Precision
from mpar.precision import precision as make_precision
from mpar.program._program import Program
from mpar.strategy import Strategy, preset

__all__ = ["compile_eval", "compile_step"]


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
    prefetch_bytes: int = 0,
    hardware: Hardware | None = None,
    kernels: Kernels | None = None,
) -> Program:
    """Compile the loss of a batch without its gradient: the forwards of `schedule`, on stages that lie where training has them.

    Arguments are those of `compile_step`. The program's state is the parameters alone, which a step leaves as they are; its
    metrics are loss, microbatch_losses, weight, other losses and what segments report.
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


def _compile(
    model: Chain,
    optimizer: Optimizer | None,
    mesh: Mesh,
    strategy: Strategy | str,
    batch_shape: BatchShape,
    options: CompileOptions,
) -> Program:
    """Build the program and prove it."""
    check_chain(model)
    strategy = preset(strategy) if isinstance(strategy, str) else strategy
    program = Program.of(build(model, optimizer, mesh, strategy, batch_shape, options))
    program.verify()
    return program
