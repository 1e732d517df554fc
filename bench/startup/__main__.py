"""`python -m bench.startup --config tiny --mesh tp2_sp`: mpar and torch in turn, each pass in fresh processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench._launch import RankFailed, launch
from bench._machine import this_run
from bench._peers import PeersMissing, find_peers, peer
from bench._result import RESULTS, Json, Result, append_results
from bench._statistics import paired_ratio
from bench._workload import save_workload
from bench.startup._worker import STEPS

TIME_BAR, MEMORY_BAR_MB = 1.2, 100.0


def torch_line(folder: Path, config: str, mesh: str, num_ranks: int) -> dict[str, float]:
    """What the peer's launch reports of itself."""
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
    """Measure and print one result. Returns 1 if the peers are missing or a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup")
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--mesh", default="tp2_sp")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.jsonl")
    args = parser.parse_args()
    mesh = args.mesh.replace("_sp", "+sp")
    try:
        ours, theirs = measure(find_peers(args.peers), args.config, mesh, args.passes)
    except (PeersMissing, RankFailed) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    result = summarise({"config": args.config, "mesh": mesh, "passes": args.passes}, ours, theirs)
    append_results(args.out, [result])
    sys.stdout.write(json.dumps({**result.case, **result.figures}, indent=1) + "\n")
    return 0


Lines = list[dict[str, float]]
"""What each launch reports of itself: "first_step_done_s", "base_mb", "peak_mb"; launches of ours also "compiler_loaded"."""


def measure(folder: Path, config: str, mesh: str, passes: int) -> tuple[Lines, Lines]:
    """What launches of ours and of the peer report, which take turns. Raises RankFailed."""
    workload = peer(folder, "workload")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as work:
        program = save_workload(Path(work), workload.CONFIGS[config], workload, mesh)
        for _ in range(passes):
            ours.append(json.loads(launch(program.mesh.size, "bench.startup._worker", [work, str(folder), config])))
            theirs.append(torch_line(folder, config, mesh, program.mesh.size))
    return ours, theirs


def summarise(facts: Mapping[str, Json], ours: Lines, theirs: Lines) -> Result:
    """Medians, and the ratio of the times."""
    medians = {
        f"{name}_{key}": round(statistics.median(line[key] for line in lines), 2)
        for key in ("first_step_done_s", "base_mb", "peak_mb")
        for name, lines in (("mpar", ours), ("torch", theirs))
    }
    ratio = paired_ratio([[line["first_step_done_s"]] for line in ours], [[line["first_step_done_s"]] for line in theirs])
    bars = {
        "time_ratio": ratio.rounded(3),
        "time_bar": TIME_BAR,
        "memory_excess_mb": round(medians["mpar_peak_mb"] - medians["torch_peak_mb"], 1),
        "memory_bar_mb": MEMORY_BAR_MB,
    }
    loaded = {"compiler_loaded": any(line["compiler_loaded"] for line in ours)}
    return Result.of({**facts, **loaded, **medians, **bars}, this_run())


if __name__ == "__main__":
    sys.exit(main())
