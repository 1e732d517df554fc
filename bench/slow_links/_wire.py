"""One rank that measures each collective of mpar over gloo, and gloo's own beside it, in units of the time that its bytes take.

Arguments: RATE NUMBERS REPEATS. Rank 0 prints a line of JSON: by operation the seconds of the slowest rank and the bytes in the
busier direction of the busiest link, for each repeat.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.slow_links._ranks import set_rate, wire_bytes
from mpar.mesh import Mesh
from mpar.runtime import ProcessComm

AXES = ("dp",)


def operations(numbers: int) -> dict[str, Callable[[], object]]:
    """By name what to measure, on `numbers` fp32 values that each rank exchanges with each other."""
    size = dist.get_world_size()
    comm: Any = ProcessComm(Mesh(dp=size), [AXES], transport="backend")
    rows, received = torch.zeros(size, numbers), torch.zeros(size, numbers)
    counts = torch.full((size,), 100, dtype=torch.int64)
    table = torch.zeros(100 * size, numbers // 100)
    how = {"axes": AXES, "size": size}

    def shift() -> object:
        return comm.arrived(comm.shift([rows[0]], **how), [])

    def exchange_rows() -> object:
        return comm.arrived(comm.exchange_rows([table], counts, counts, num_rows=None, **how), [])

    return {
        "all_gather": lambda: comm.all_gather(rows[0], dim=0, **how),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, dim=0, **how),
        "all_reduce": lambda: comm.all_reduce(rows, op="sum", **how),
        "all_to_all": lambda: comm.all_to_all(rows, src=1, dst=0, **how),
        "shift": shift,
        "exchange_rows": exchange_rows,
        "gloo all_gather": lambda: dist.all_gather_into_tensor(received.view(-1), rows[0]),
        "gloo reduce_scatter": lambda: dist.reduce_scatter_tensor(received[0], rows.view(-1)),
        "gloo all_reduce": lambda: dist.all_reduce(rows),
        "gloo all_to_all": lambda: dist.all_to_all_single(received, rows),
    }


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds of the slowest rank, bytes in the busier direction of the busiest link) of one call."""
    dist.barrier()
    before, began = wire_bytes(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    dist.barrier()  # what others have still to send belongs to this call
    moved = max(now - then for now, then in zip(wire_bytes(), before, strict=True))
    both = torch.tensor([seconds, moved], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both[0]), float(both[1])


def main() -> None:
    """The entry of a rank."""
    rate, numbers, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_of_them = operations(numbers)
    for work in all_of_them.values():
        work()
    dist.barrier()
    if dist.get_rank() == 0:
        set_rate(rate)
    dist.barrier()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in all_of_them}
    for _ in range(repeats):
        for name, work in all_of_them.items():
            found[name].append(measure(work))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads would wait for ranks that are gone


if __name__ == "__main__":
    main()
