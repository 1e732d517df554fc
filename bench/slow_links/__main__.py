"""`python -m bench.slow_links wire`: how long collectives take, over the time that their bytes need on the wire."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench._launch import RankFailed
from bench._machine import foreign_cpu_s, this_run
from bench._result import RESULTS, Result, append_results
from bench.slow_links._links import LinkError, Links, bits_per_s
from bench.slow_links._ranks import run_ranks

BAR = 1.1


def main() -> int:
    """Measure, print and record. Returns 1 if there can be no links here, or a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_links")
    commands = parser.add_subparsers(dest="command", required=True)
    wire = commands.add_parser("wire", help="time of each collective over the time of its bytes")
    wire.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    wire.add_argument("--rate", default="100mbit", help="of every link and direction: 50mbit, 1gbit")
    wire.add_argument("--numbers", type=int, default=400_000, help="fp32 values that a rank sends to each other")
    wire.add_argument("--repeats", type=int, default=5)
    wire.add_argument("--out", type=Path, default=RESULTS / "slow_links.jsonl")
    args = parser.parse_args()
    try:
        for num_ranks in args.ranks:
            results = measure_wire(num_ranks, args.rate, args.numbers, args.repeats)
            append_results(args.out, results)
            for result in results:
                sys.stdout.write(json.dumps({**result.case, **result.figures}) + "\n")
                sys.stdout.flush()
    except (LinkError, RankFailed) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def measure_wire(num_ranks: int, rate: str, numbers: int, repeats: int) -> list[Result]:
    """A line for each operation: `wire_ratio` is the median time over that of its bytes, `worst` the highest."""
    began, busy = time.monotonic(), foreign_cpu_s()
    with Links(num_ranks, "unlimited") as links:
        found = json.loads(run_ranks(links, "bench.slow_links._wire", [rate, str(numbers), str(repeats)]))
    cores = (foreign_cpu_s() - busy) / (time.monotonic() - began)
    results = []
    for name, calls in found.items():
        ratios = [seconds * bits_per_s(rate) / (8 * moved) for seconds, moved in calls]
        figures = {
            "megabytes": round(statistics.median(moved for _, moved in calls) / 1e6, 3),
            "ms": round(1e3 * statistics.median(seconds for seconds, _ in calls), 2),
            "wire_ratio": round(statistics.median(ratios), 3),
            "worst": round(max(ratios), 3),
            "bar": BAR,
            "busy_cores": round(cores, 2),  # of all processes, these too
        }
        case = {"bench": "slow_links", "case": "wire", "ranks": num_ranks, "rate": rate, "threads": 1, "variant": name}
        results.append(Result.of({**case, **figures}, this_run()))
    return results


if __name__ == "__main__":
    sys.exit(main())
