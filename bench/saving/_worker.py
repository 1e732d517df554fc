"""One rank that saves its half of a state again and again, with mpar and with torch in turn. Rank 0 prints what all measured."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mpar.checkpoint import SaveOptions, Saver
from mpar.mesh import Mesh
from mpar.spec import P

__all__ = ["VARIANTS", "main"]

WIDTH = 1024
SAVES = 2  # in each turn of a variant, after one that is not measured


class Mpar:
    """A Saver, whose memory is kept from save to save."""

    def __init__(self, folder: Path, local: dict[str, torch.Tensor], run: str) -> None:
        mesh = Mesh(fsdp=dist.get_world_size())
        leaves = {name: ((len(x) * mesh.size, WIDTH), P("fsdp"), x.dtype) for name, x in local.items()}
        self.local, self.saver = local, Saver(folder, leaves, mesh, dist.get_rank(), SaveOptions(run))

    def begin(self, step: int) -> None:
        """Copy the state, and start to write."""
        self.saver.begin(step, self.local, {"step": step})

    def under_way(self) -> bool:
        """Whether this rank is still busy with the save."""
        return self.saver.under_way

    def wait(self) -> None:
        """Wait until the checkpoint is there."""
        self.saver.wait()

    def close(self) -> None:
        """Give the memory back."""
        del self.saver


class Torch:
    """torch's async_save with a thread. `cached`: its copy of the state is kept from save to save; by default it is not."""

    def __init__(self, folder: Path, local: dict[str, torch.Tensor], group: dist.ProcessGroup, *, cached: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = {name: DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for name, x in local.items()}
        self.folder, self.group = folder, group
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if cached else None
        self.future: Future = Future()

    def begin(self, step: int) -> None:
        """Copy the state, and start to write."""
        writer = FileSystemWriter(self.folder / f"step_{step:08d}")
        saving = async_save(self.state, storage_writer=writer, async_stager=self.stager, process_group=self.group)
        self.future = saving if isinstance(saving, Future) else saving.upload_completion

    def under_way(self) -> bool:
        """Whether this rank is still busy with the save."""
        return not self.future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is there."""
        self.future.result()

    def close(self) -> None:
        """Give the memory back."""
        if self.stager is not None:
            self.stager.close()
        self.stager, self.future = None, Future()


Variant = Mpar | Torch
VARIANTS = ("mpar", "torch_cached", "torch")


def status_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024


def train(seconds: float, busy: Callable[[], bool] = lambda: True) -> list[float]:
    """Times of steps that compute and communicate, for so many seconds and while `busy`."""
    x, times, began = torch.randn(512, 512), [], time.perf_counter()
    while busy() and time.perf_counter() - began < seconds:
        step_began = time.perf_counter()
        for _ in range(20):
            x = (x @ x).tanh()
        times.append(time.perf_counter() - step_began)
    return times


def turn(variant: Variant, folder: Path, first: int) -> dict[str, list[float]]:
    """Measure one variant: saves while nothing else runs, then one while training goes on. The first save is not measured."""
    found: dict[str, list[float]] = {name: [] for name in ("stall_s", "stall_cpu_s", "total_s", "cpu_s", "busy_step_s")}
    found["step_s"] = train(2.0)
    for number in range(SAVES + 2):
        dist.barrier()
        began, began_cpu, began_thread = time.perf_counter(), time.process_time(), time.thread_time()
        variant.begin(first + number)
        stall_s, stall_cpu_s = time.perf_counter() - began, time.thread_time() - began_thread
        if number == SAVES + 1:
            found["busy_step_s"] = train(60.0, variant.under_way)
        variant.wait()
        if 0 < number <= SAVES:
            found["stall_s"].append(stall_s)
            found["stall_cpu_s"].append(stall_cpu_s)
            found["total_s"].append(time.perf_counter() - began)
            found["cpu_s"].append(time.process_time() - began_cpu)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            folder.mkdir()
    return found


def main() -> None:
    """The entry of one rank, with the arguments FOLDER GIGABYTES ROUNDS VARIANTS."""
    folder, size_bytes, rounds = Path(sys.argv[1]), float(sys.argv[2]) * 1e9, int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    rank, count = dist.get_rank(), 24
    rows = int(size_bytes / 4 / WIDTH / dist.get_world_size() / count)
    local = {f"layers.{i:02d}": torch.randn(rows, WIDTH) for i in range(count)}
    mine: dict[str, dict[str, list[list[float]]]] = {}
    train(1.0)
    for number in range(rounds):
        for name in sys.argv[4].split(","):
            own = folder / name
            own.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            before = status_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            variant: Variant
            if name == "mpar":
                variant = Mpar(own, local, f"r{number}")
            else:
                variant = Torch(own, local, group, cached=name == "torch_cached")
            found = turn(variant, own, 1)
            found["memory"] = [(status_bytes("VmHWM") - before) / (rows * count * WIDTH * 4)]
            variant.close()
            del variant
            for key, values in found.items():
                mine.setdefault(name, {}).setdefault(key, []).append(values)
    results: list = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    if rank == 0:
        sys.stdout.write(json.dumps(results) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
