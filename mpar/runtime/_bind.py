"""Bind: make a program ready to run on the processes of torch.distributed."""

from typing import Any

import torch

from mpar.errors import ConfigError, UnknownNameError
from mpar.ir import HOME, ProgramData
from mpar.plain_value import PlainValue
from mpar.runtime._capture import Replay
from mpar.runtime._device import asking_references
from mpar.runtime._rank_run import Progress, RankRun
from mpar.runtime.comm import ALIGN, ALONE, Comm, Counter, ProcessComm, exchange
from mpar.torch_private import has_cpp_compiler

__all__ = ["bind", "check_inductor"]

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
    timeout_s: float | None = None,
) -> RankRun | Replay:
    """The run of this process's rank, on the processes that torch.distributed has started.

    execution: "eager" calls the generated code; "inductor" compiles it by torch's Inductor when it is first called, with the
               references of primitives, except between messages of ranks; "cuda_graph" records the second step on one GPU and
               replays it afterwards, with the same bits as "eager". Code that Inductor compiled keeps the operands of a segment
               until its end, so it needs more memory than is predicted.
    order:     "rank" adds in the order of ranks, with the same bits as the simulation; "library" leaves sums to the backend.
               None: "library" on CUDA devices, else "rank".
    transport: for CPU tensors that are added in the order of ranks: "shared" memory or the "backend", with the same bits. None:
               shared memory for every group whose ranks are all on one machine.
    timeout_s: how long a rank waits for others in a collective; None: as long as torch.distributed does by default.
    Raises UnknownNameError for another order, transport or execution; ConfigError for shared memory with tensors that are not on
    the CPU, for Inductor on a CPU without a C++ compiler, and for CUDA graphs on a CPU or with several ranks.
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
        timeout_s=timeout_s,
    )
    threads = _over_network(program, comm, counter, timeout_s) if torch.device(device).type == "cpu" else {}
    return RankRun(program, comm, device, progress, inductor=inductor, threads=threads)


def _over_network(
    program: ProgramData, comm: ProcessComm, counter: Counter | None, timeout_s: float | None
) -> dict[str, Comm]:
    """The communication of each queue whose collectives all go over the network: groups of its own, so that no other queue comes
    in between. Memory that ranks share gains nothing from threads: its collectives take CPU time. All ranks must call this.
    """
    uses: dict[str, set[tuple[str, ...]]] = {}
    for instruction in (instruction for part in program.parts for instruction in part.instructions):
        if instruction.message < 0 and instruction.queue != HOME and (kind := program.kinds[instruction.kind]).collectives:
            axes = uses.setdefault(instruction.queue, set())
            axes.update(use.axes for use in kind.collectives)
            axes.update(kind.coordinates)
    mine: PlainValue = [queue for queue, axes in sorted(uses.items()) if comm.over_network(axes)]
    agreed = set.intersection(*map(set, exchange(mine)))
    how: dict[str, Any] = {"order": comm.order, "counter": counter and counter.of_thread(), "timeout_s": timeout_s}
    how |= {"transport": "backend", "own_groups": True}
    return {queue: ProcessComm(program.mesh, uses[queue], **how) for queue in sorted(agreed)}


def check_inductor(device: torch.device | str) -> None:
    """Raise ConfigError if Inductor cannot compile for `device`: for a CPU it needs a C++ compiler."""
    if torch.device(device).type == "cpu" and not has_cpp_compiler():
        raise ConfigError(
            "cannot bind with execution='inductor': there is no C++ compiler, with which torch compiles for a CPU. Install g++, "
            "or name another one in the environment variable CXX, or use execution='eager'."
        )


def _check_arguments(
    program: ProgramData, device: torch.device, order: str | None, transport: str | None, execution: str
) -> None:
    """Raise UnknownNameError for unknown names, and ConfigError for options that the device or the program does not permit."""
    if execution not in EXECUTIONS:
        raise UnknownNameError(f"no execution is called {execution!r}; there are {', '.join(EXECUTIONS)}")
    if execution == "inductor":
        check_inductor(device)
    if execution == "cuda_graph" and (device.type != "cuda" or program.mesh.size > 1):
        raise ConfigError(
            f"cannot bind with execution='cuda_graph' on device {device!s} and {program.mesh}: a step is recorded on one GPU. "
            "Use eager or inductor."
        )
    if execution == "cuda_graph" and any(step.op == "offload" for part in program.parts for step in part.instructions):
        raise ConfigError(
            "cannot bind with execution='cuda_graph': activations are copied to the memory of the host, which is allocated anew "
            "in each step, where a recorded step has fixed addresses. Use recompute.offload=false, or execution='eager'."
        )
    asking = sorted({name for kind in program.kinds.values() for name in asking_references(kind.source)})
    if execution == "cuda_graph" and asking:
        raise ConfigError(
            f"cannot bind with execution='cuda_graph': the references of {', '.join(asking)} read data on the host, which cannot "
            "be recorded. Use kernels=auto on a chip that has kernels, or execution='eager'."
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
    """Bytes of the longest message that is posted over each tuple of axes, with the room between its tensors."""
    longest: dict[tuple[str, ...], int] = {}
    for use in (use for kind in program.kinds.values() for use in kind.collectives):
        if use.bound_bytes:
            longest[use.axes] = max(longest.get(use.axes, 0), use.bound_bytes + ALIGN * use.tensors)
    return longest
