"""`python -m bench.startup --config tiny --mesh tp2_sp`: mpar and torch in turn, each pass in fresh processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench._launch import RankFailed, launch
from bench._machine import machine
from bench._peers import PeersMissing, find_peers, peer
from bench._report import RESULTS, append_lines
from bench._statistics import paired_ratio
from bench._workload import save_workload
from bench.startup._worker import STEPS

TIME_BAR, MEMORY_BAR_MB = 1.2, 100.0


def torch_line(folder: Path, config: str, mesh: str, num_ranks: int) -> dict[str, float]:
    """What the peer reports of itself."""
    args = ["torch_spmd.py", "--config", config, "--mesh", mesh, "--steps", str(STEPS - 1), "--warmup", "1"]
    command = [sys.executable, "launch.py", str(num_ranks), *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RankFailed(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    line = json.loads(done.stdout.splitlines()[-1])
    return {
        "first_step_done_s": line["startup_s"] + line["first_step_s"],
        "base_mb": line["base_rss_mb_per_rank"],
        "peak_mb": line["peak_rss_mb_per_rank"],
    }


def main() -> int:
    """Measure and print one line; 1 if the peers are missing or a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup")
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--mesh", default="tp2_sp")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.jsonl")
    args = parser.parse_args()
    mesh = args.mesh.replace("_sp", "+sp")
    ours, theirs = [], []
    try:
        folder = find_peers(args.peers)
        workload = peer(folder, "workload")
        with tempfile.TemporaryDirectory() as work:
            program = save_workload(Path(work), workload.CONFIGS[args.config], workload, mesh)
            for _ in range(args.passes):
                ours.append(json.loads(launch(program.mesh.size, "bench.startup._worker", [work, str(folder), args.config])))
                theirs.append(torch_line(folder, args.config, mesh, program.mesh.size))
    except (PeersMissing, RankFailed) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    ratio = paired_ratio([[x["first_step_done_s"]] for x in ours], [[x["first_step_done_s"]] for x in theirs])
    line = {
        "config": args.config,
        "mesh": mesh,
        "passes": args.passes,
        "compiler_loaded": any(x["compiler_loaded"] for x in ours),
    }
    for key in ("first_step_done_s", "base_mb", "peak_mb"):
        line |= {
            f"{name}_{key}": round(statistics.median(x[key] for x in xs), 2) for name, xs in (("mpar", ours), ("torch", theirs))
        }
    line |= {"time_ratio": [round(x, 3) for x in (ratio.median, ratio.low, ratio.high)], "time_bar": TIME_BAR}
    line |= {"memory_excess_mb": round(line["mpar_peak_mb"] - line["torch_peak_mb"], 1), "memory_bar_mb": MEMORY_BAR_MB}
    append_lines(args.out, [line | machine()])
    sys.stdout.write(json.dumps(line, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
