"""One rank that loads a compiled program and takes a few steps. Rank 0 prints when the first was done, and all ranks' memory."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench._peers import find_peers, peer
from bench._rank import load_step

__all__ = ["main"]

STEPS = 4


def status_mb(field: str) -> float:
    """A field of /proc/self/status in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def main() -> None:
    """The entry of one rank, with the arguments WORK PEERS CONFIG."""
    work, peers, config = sys.argv[1:]
    workload = peer(find_peers(peers), "workload")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = load_step(Path(work), workload, workload.CONFIGS[config], dist.get_rank(), None)
    base = status_mb("VmRSS")
    step()
    first_done = time.time() - float(os.environ["PEERS_LAUNCHED_AT"])
    for _ in range(STEPS - 1):
        step()
    mine = {"first_step_done_s": first_done, "base_mb": base, "rss_mb": status_mb("VmRSS"), "peak_mb": status_mb("VmHWM")}
    mine["compiler_loaded"] = "mpar.compiler.build._build" in sys.modules
    results: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    if dist.get_rank() == 0:
        worst = {key: max(result[key] for result in results) for key in mine}
        sys.stdout.write(json.dumps(worst) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
