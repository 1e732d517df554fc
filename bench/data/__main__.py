"""`python -m bench.data encode`, `load`, `stream`, `memory` and `wait`: each prints one result, and appends it to
`bench/results/data.jsonl`."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench._machine import foreign_cpu_s, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench._statistics import paired_ratio
from bench.data._corpus import write_corpus, write_short_rows, write_tokenizer

RATE_BAR, WORKERS_BAR, GROWTH_BAR_MB, WAIT_BAR, STEP_BAR = 0.9, 1.8, 50.0, 0.01, 1.02


def measured(what: str, folder: Path, number: int) -> dict[str, Any]:
    """What a process of its own measures, and how many cores others used meanwhile."""
    began, foreign = time.perf_counter(), foreign_cpu_s()
    words = [sys.executable, "-m", "bench.data._measured", what, str(folder), str(number)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | _only_tokenizers(folder, what))
    found = json.loads(done.stdout.splitlines()[-1])
    busy_s = foreign_cpu_s() - foreign - found.get("cpu_s", 0.0)
    return {**found, "foreign_cores": round(busy_s / (time.perf_counter() - began), 2)}


def _only_tokenizers(folder: Path, what: str) -> dict[str, str]:
    """The environment in which workers do without gigatoken, so that they have something to do."""
    if what not in ("load", "stream"):
        return {}
    (folder / "without").mkdir(exist_ok=True)
    (folder / "without" / "gigatoken.py").write_text("raise ImportError\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder / "without"), os.environ.get("PYTHONPATH", "")])}


def encode(rows: int, passes: int) -> dict[str, Json]:
    """How fast data in memory are made by one process, beside the library alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", rows)
        write_tokenizer(folder / "tokenizer")
        beside = measured("beside_encode", folder, 2 * passes)
    return {
        **{"rows": rows, "passes": passes, "foreign_cores": beside["foreign_cores"]},
        "rate_of_encode_cpu": [round(beside[key], 3) for key in ("rate_of_encode_cpu", "lowest", "highest")],
        "rate_bar": RATE_BAR,
        "with_gigatoken_cpu": round(beside["with_gigatoken"], 2),
        "gigatoken_alone_cpu": round(beside["gigatoken_alone"], 2),
    }


def workers(what: str, rows: int, passes: int) -> dict[str, Json]:
    """How much faster two workers `load` a corpus, or `stream` it, than one does. They take turns.

    `at_most` is what two processes gain that do the whole work each, at the same time: what two cores of this machine give.
    """
    lines: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", rows)
        write_tokenizer(folder / "tokenizer")
        for number in range(passes):
            for count in lines:
                line = measured(what, folder, count)
                lines[count].append(line)
                sys.stderr.write(f"pass {number + 1} of {passes}: {what}, workers {count}: {line['wall_s']:.1f} s\n")
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _: measured(what, folder, 1)["wall_s"], range(2)))
    figures: dict[str, Json] = {"rows": rows, "passes": passes}
    for count, line in lines.items():
        for key in ("wall_s", "cpu_s", "foreign_cores"):
            figures[f"{key}_{count}"] = [round(each[key], 2) for each in line]
    wall = paired_ratio(*([[each["wall_s"] for each in lines[count]]] for count in (1, 2)))
    at_most = 2 * statistics.median(each["wall_s"] for each in lines[1]) / max(both)
    return {**figures, "two_workers_wall": wall.rounded(), "at_most": round(at_most, 3), "bar": WORKERS_BAR}


def memory(rows: int) -> dict[str, Json]:
    """How much more memory a stream takes after many rows than after the first ones."""
    with tempfile.TemporaryDirectory() as name:
        write_short_rows(Path(name) / "short.jsonl", rows + 2000)
        return {**measured("memory", Path(name), rows), "bar_mb": GROWTH_BAR_MB}


def wait(steps: int, passes: int) -> dict[str, Json]:
    """The share of the steps of `tiny` that waits for the data of a stream, and the steps beside the same ones with the same
    batches from memory. Each pass is a process that takes both in turn, so that a ratio is not one of two processes."""
    runs: list[dict[str, dict[str, list[float]]]] = []
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name) / "corpus.jsonl", 6000)
        write_tokenizer(Path(name) / "tokenizer")
        for _ in range(passes):
            runs.append(measured("steps", Path(name), steps))
    figures: dict[str, Json] = {"steps": steps, "passes": passes, "foreign_cores": [run["foreign_cores"] for run in runs]}
    for kind in ("stream", "memory"):
        figures[f"{kind}_step_s"] = round(statistics.median(value for run in runs for value in run[kind]["wall"]), 4)
    waited, spent = (sum(sum(run["stream"][key]) for run in runs) for key in ("data", "wall"))
    for key in ("wall", "cpu"):
        ratio = paired_ratio(*([run[kind][key] for run in runs] for kind in ("stream", "memory")))
        figures[f"stream_over_memory_{key}"] = ratio.rounded()
    return {**figures, "stream_wait": round(waited / spent, 6), "bar": WAIT_BAR, "step_bar": STEP_BAR}


def main() -> int:
    """Measure and print one result."""
    parser = argparse.ArgumentParser(prog="python -m bench.data")
    parser.add_argument("what", choices=("encode", "load", "stream", "memory", "wait"))
    parser.add_argument("--rows", type=int, default=None, help="24,000 of 1,000 characters; memory: a million short ones")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "data.jsonl")
    args = parser.parse_args()
    figures: Mapping[str, Json]
    if args.what == "encode":
        figures = encode(args.rows or 24_000, args.passes)
    elif args.what in ("load", "stream"):
        figures = workers(args.what, args.rows or 24_000, args.passes)
    elif args.what == "memory":
        figures = memory(args.rows or 1_000_000)
    else:
        figures = wait(args.steps, args.passes)
    append_results(args.out, [Result.of({"bench": "data", "case": args.what, **figures}, this_run())])
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
