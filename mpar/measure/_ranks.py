"""Ranks: the processes that measure at the same time, as ranks of a run compute at the same time."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mpar.errors import MeshError
from mpar.hardware import hardware
from mpar.measure._factors import measure_factors
from mpar.measure._links import measure_links
from mpar.measure._profile import profile_of
from mpar.measure._rates import measure_rates
from mpar.measure._timing import seconds_of

__all__ = ["Machine", "measure_machine"]

_DTYPES = {"cpu": [torch.float64, torch.bfloat16, torch.float32], "cuda": [torch.float64, torch.float32, torch.bfloat16]}


@dataclass(frozen=True)
class Machine:
    """How many ranks measure, on which device ("cpu" or "cuda"), with how many threads each, how they exchange ("backend",
    "shared" or None, as of `Program.bind`), and for how many seconds each rate is measured."""

    ranks: int
    device: str
    threads: int
    transport: str | None = None
    seconds_each: float = 0.3


def measure_machine(machine: Machine, report: Callable[[str, float], None]) -> dict[str, float]:
    """The rates of this machine by name, each of the slowest rank; `flops_per_s.float32` is an entry of `flops_per_s`.

    report: called with each rate as it is known. Raises MeshError if there are fewer GPUs than ranks.
    """
    if machine.device == "cuda" and torch.cuda.device_count() < machine.ranks:
        raise MeshError(f"cannot measure {machine.ranks} ranks on GPUs: this machine has {torch.cuda.device_count()}.")
    found: dict[str, list[float]] = {}
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(  # type: ignore[attr-defined]
            _rank, (machine, str(Path(folder, "store")), told), machine.ranks, join=False, daemon=True, start_method="spawn"
        )
        try:
            ended = False
            while not ended or not told.empty():
                ended = ended or processes.join(timeout=0.1)
                while not told.empty():
                    name, value = told.get()
                    found.setdefault(name, []).append(value)
                    if len(found[name]) == machine.ranks:
                        report(name, _slowest(name, found[name]))
        finally:
            for process in processes.processes:
                process.kill()
    return {name: _slowest(name, values) for name, values in found.items()}


def _slowest(name: str, values: list[float]) -> float:
    """The value of the slowest rank: the longest time, or the lowest rate."""
    table = name.partition(".")[0]
    is_time = table == "op_factors" or (table.endswith("_s") and not table.endswith("per_s"))
    return max(values) if is_time else min(values)


def _together(device: torch.device, budget_s: float) -> Callable[[Callable[[], object]], float]:
    """Times a call while all ranks do."""

    def seconds(call: Callable[[], object]) -> float:
        dist.barrier()
        return seconds_of(call, device, budget_s=budget_s)

    return seconds


def _rank(rank: int, machine: Machine, store: str, told: "mp.SimpleQueue") -> None:
    """Measure as one rank, and tell every rate."""
    torch.set_num_threads(machine.threads)
    device = torch.device(machine.device, rank) if machine.device == "cuda" else torch.device("cpu")
    if machine.device == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if machine.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, machine.ranks), rank=rank, world_size=machine.ranks)
    rates, seconds = {}, _together(device, machine.seconds_each)
    for name, value in measure_rates(device, _DTYPES[machine.device], seconds):
        rates[name] = value
        told.put((name, value))
    for name, value in measure_factors(device, profile_of("measured", rates, {}, hardware("cpu")), seconds):
        told.put((name, value))
    if machine.ranks > 1:
        for name, value in measure_links(machine.ranks, device, machine.transport):
            told.put((name, value))
    dist.barrier()
    dist.destroy_process_group()
