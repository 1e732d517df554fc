"""`python -m bench.saving`: mpar's Saver and torch's async_save, of the same state in the same processes, in turn."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from bench._launch import RankFailed, launch
from bench._machine import foreign_cpu_s, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench._statistics import paired_ratio, verdict
from bench.saving._worker import VARIANTS

BAR = 1.0
FIGURES = ("step_s", "busy_step_s", "memory")
Found = dict[str, dict[str, list[list[float]]]]
"""By variant and figure: for each turn what was measured in it."""


def of_all_ranks(ranks: list[Found], variant: str, figure: str, join: Callable[[Iterable[float]], float]) -> list[list[float]]:
    """One value for each save, by turn."""
    turns = zip(*(rank[variant][figure] for rank in ranks), strict=True)
    return [[join(values) for values in zip(*turn, strict=True)] for turn in turns]


def summarise(ranks: list[Found], variants: Sequence[str], case: Mapping[str, Json]) -> list[Result]:
    """A line for each variant; that of mpar has the ratios to the better of torch's two. A save lasts as long as that of the
    slowest rank; CPU seconds are those of all ranks.
    """
    joins: dict[str, Callable[[Iterable[float]], float]] = {"stall_s": max, "stall_cpu_s": max, "total_s": max, "cpu_s": sum}
    times = {v: {name: of_all_ranks(ranks, v, name, join) for name, join in joins.items()} for v in variants}
    medians = {v: {name: statistics.median(chain(*turns)) for name, turns in times[v].items()} for v in variants}
    lines: list[dict[str, Json]] = []
    for variant in variants:
        values = {name: [x for rank in ranks for turn in rank[variant][name] for x in turn] for name in FIGURES}
        slower = statistics.fmean(values["busy_step_s"]) / statistics.fmean(values["step_s"])
        rounded = {name: round(value, 4) for name, value in medians[variant].items()}
        more = {"steps_meanwhile": round(slower, 3), "memory_of_shards": round(max(values["memory"]), 3)}
        lines.append({**case, "variant": variant, **rounded, **more, "bar": BAR})
    for name in joins:
        peer = min((v for v in variants if v != "mpar"), key=lambda variant: medians[variant][name])
        ratio = paired_ratio(times["mpar"][name], times[peer][name]).rounded(3)
        lines[0] |= {f"{name}_ratio": ratio, f"{name}_peer": peer, f"{name}_verdict": verdict(ratio, BAR)}
    return [Result.of(line, this_run()) for line in lines]


def main() -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="python -m bench.saving")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the state, on all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="mpar and at least one of torch's")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the checkpoints are written, and removed")
    parser.add_argument("--out", type=Path, default=RESULTS / "saving.jsonl")
    args = parser.parse_args()
    began, busy = time.monotonic(), foreign_cpu_s()
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            words = [folder, str(args.gigabytes), str(args.rounds), ",".join(args.variants)]
            found = json.loads(launch(args.ranks, "bench.saving._worker", words))
    except RankFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    case: dict[str, Json] = {"bench": "saving", "ranks": args.ranks, "threads": 1, "gigabytes": args.gigabytes}
    case["busy_cores"] = round((foreign_cpu_s() - busy) / (time.monotonic() - began), 2)  # of all processes, these too
    results = summarise(found, args.variants, case)
    append_results(args.out, results)
    for result in results:
        sys.stdout.write(json.dumps({**result.case, **result.figures}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
