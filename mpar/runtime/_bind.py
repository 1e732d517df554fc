"""Bind: a program on the processes of torch.distributed."""

import torch

from mpar.errors import ConfigError, UnknownNameError
from mpar.ir import ProgramData
from mpar.runtime._capture import Replay
from mpar.runtime._device import asking_references
from mpar.runtime._rank_run import Progress, RankRun
from mpar.runtime.comm import ALIGN, ALONE, Counter, ProcessComm

__all__ = ["bind"]

EXECUTIONS = ("eager", "inductor", "cuda_graph")


def bind(
    program: ProgramData,
    *,
    device: torch.device | str = "cpu",
    order: str | None = None,
    counter: Counter | None = None,
    progress: Progress | None = None,
    transport: str | None = None,
    execution: str = "eager",
) -> RankRun | Replay:
    """This process's rank of the program, on the processes that torch.distributed has started.

    execution: "eager" calls the generated code; "inductor" compiles it by torch.compile when it is first called; "cuda_graph"
               records the second step and replays it, on one GPU. The bits of "cuda_graph" are those of "eager". What Inductor
               compiled keeps a segment's operands to its end: it needs more memory than is predicted.

    order:     "rank" sums in rank order, the simulator's bits (default but on NCCL); "library" leaves sums to the backend.
    transport: for CPU tensors in rank order, "shared" memory or the "backend"; default: shared where all ranks of a group are on
               one machine. The bits are the same.
    Raises UnknownNameError for another order, transport or execution, ConfigError for shared memory of tensors that are not on
    the CPU, and for CUDA graphs on a CPU or on several ranks.
    """
    _check_arguments(program, torch.device(device), order, transport, execution)
    inductor = execution == "inductor"
    if program.mesh.size == 1:
        run = RankRun(program, ALONE, device, progress, inductor=inductor)
        return Replay(run) if execution == "cuda_graph" else run
    order = order or ("library" if torch.device(device).type == "cuda" else "rank")
    transport = transport if torch.device(device).type == "cpu" else "backend"
    comm = ProcessComm(
        program.mesh,
        program.axes_used(),
        order=order,
        counter=counter,
        transport=transport,
        messages=program.messages(),
        posted=posted_bytes(program),
        device=device,
    )
    return RankRun(program, comm, device, progress, inductor=inductor)


def _check_arguments(
    program: ProgramData, device: torch.device, order: str | None, transport: str | None, execution: str
) -> None:
    """Refuse names that do not exist, and ways to run that this device or this program cannot have."""
    if execution not in EXECUTIONS:
        raise UnknownNameError(f"no execution is called {execution!r}; there are {', '.join(EXECUTIONS)}")
    if execution == "cuda_graph" and (device.type != "cuda" or program.mesh.size > 1):
        raise ConfigError(
            f"cannot bind with execution='cuda_graph' on device {device!s} and {program.mesh}: a step is recorded on one GPU. "
            "Use eager or inductor."
        )
    asking = sorted({name for kind in program.kinds.values() for name in asking_references(kind.source)})
    if execution == "cuda_graph" and asking:
        raise ConfigError(
            f"cannot bind with execution='cuda_graph': the references of {', '.join(asking)} look at data on the host, which a "
            "recording cannot. Use kernels=auto on a chip that has kernels, or execution='eager'."
        )
    if order not in (None, "rank", "library"):
        raise UnknownNameError(f"no order of addition is called {order!r}; there are rank and library")
    if transport not in (None, "shared", "backend"):
        raise UnknownNameError(f"no transport is called {transport!r}; there are shared and backend")
    if transport == "shared" and (order == "library" or device.type != "cpu"):
        raise ConfigError(
            f"cannot bind with transport='shared' on device {device!s} with order={order!r}: "
            "shared memory sums CPU tensors in rank order"
        )


def posted_bytes(program: ProgramData) -> dict[tuple[str, ...], int]:
    """The longest message that is posted over each tuple of axes, with room between its tensors."""
    longest: dict[tuple[str, ...], int] = {}
    for use in (use for kind in program.kinds.values() for use in kind.collectives):
        if use.most_bytes:
            longest[use.axes] = max(longest.get(use.axes, 0), use.most_bytes + ALIGN * use.tensors)
    return longest
