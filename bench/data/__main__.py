"""`python -m bench.data speed`, `memory` and `wait`: each prints one result, and appends it to `bench/results/data.jsonl`."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench._machine import foreign_cpu_s, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench._statistics import paired_ratio
from bench.data._corpus import write_corpus, write_short_rows, write_tokenizer

RATE_BAR, WORKERS_BAR, GROWTH_BAR_MB, WAIT_BAR, STEP_BAR = 0.9, 1.8, 50.0, 0.01, 1.02


def measured(what: str, folder: Path, number: int) -> dict[str, float]:
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


def speed(rows: int, passes: int) -> dict[str, Json]:
    """How fast data in memory are made beside the library alone, and with two workers; and streams."""
    cases = [("load", 1), ("load", 2), ("stream", 1), ("stream", 2)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", rows)
        write_tokenizer(folder / "tokenizer")
        beside = measured("beside_encode", folder, 2 * passes)
        lines = {case: [] for case in cases}
        for _ in range(passes):
            for case in cases:
                lines[case].append(measured(case[0], folder, case[1]))

    def median(what: str, workers: int, key: str) -> float:
        return statistics.median(line[key] for line in lines[what, workers])

    figures: dict[str, Json] = {"rows": rows, "passes": passes}
    for what, workers in cases:
        for key in ("wall_s", "cpu_s", "foreign_cores"):
            figures[f"{what}_{workers}_{key}"] = round(median(what, workers, key), 3)
    return {
        **figures,
        "rate_of_encode_cpu": [round(beside[key], 3) for key in ("rate_of_encode_cpu", "lowest", "highest")],
        "rate_bar": RATE_BAR,
        "with_gigatoken_cpu": round(beside["with_gigatoken"], 2),
        "gigatoken_alone_cpu": round(beside["gigatoken_alone"], 2),
        "two_workers_wall": round(median("load", 1, "wall_s") / median("load", 2, "wall_s"), 3),
        "two_workers_at_most": round(2 * median("load", 1, "cpu_s") / median("load", 2, "cpu_s"), 3),
        "workers_bar": WORKERS_BAR,
    }


def memory(rows: int) -> dict[str, Json]:
    """How much more memory a stream takes after many rows than after the first ones."""
    with tempfile.TemporaryDirectory() as name:
        write_short_rows(Path(name) / "short.jsonl", rows + 2000)
        return {**measured("memory", Path(name), rows), "bar_mb": GROWTH_BAR_MB}


def wait(steps: int, passes: int) -> dict[str, Json]:
    """The share of the steps of `tiny` that waits for the data of a stream, and its steps beside those of the same data from
    memory, in runs that take turns."""
    kinds = {"stream": ["data.stream=true", "data.shuffle_rows=1000"], "memory": []}
    records: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", 6000)
        write_tokenizer(folder / "tokenizer")
        for number in range(passes):
            for kind, options in kinds.items():
                records[kind].append(_train(folder, f"{kind}{number}", steps, options))
    step_s = {kind: [[record["step_s"] for record in run] for run in runs] for kind, runs in records.items()}
    shares: dict[str, Json] = {}
    for kind, runs in records.items():
        shares[f"{kind}_step_s"] = round(statistics.median(statistics.median(run) for run in step_s[kind]), 4)
        shares[f"{kind}_wait"] = round(sum(record["data_s"] for run in runs for record in run) / sum(map(sum, step_s[kind])), 5)
    ratio = paired_ratio(step_s["stream"], step_s["memory"]).rounded()
    return {**shares, "steps": steps, "passes": passes, "bar": WAIT_BAR, "stream_over_memory": ratio, "step_bar": STEP_BAR}


def _train(folder: Path, run: str, steps: int, options: list[str]) -> list[dict[str, float]]:
    """The records of the steps of a run behind its first ten."""
    words = [
        sys.executable, "-m", "mpar", "train", "task=pt", "data=jsonl", f"data.sources=[{folder}/corpus.jsonl]",
        f"data.tokenizer={folder}/tokenizer", "data.seq_len=256", "mesh=one", "strategy=ddp", f"steps={steps}",
        "model.config.vocab_size=16384", "num_threads=1", "checkpoint.every=null", "task.chat=[]", "tensorboard=false",
        f"run_dir={folder}/{run}", *options,
    ]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[10:]]


def main() -> int:
    """Measure and print one result."""
    parser = argparse.ArgumentParser(prog="python -m bench.data")
    parser.add_argument("what", choices=("speed", "memory", "wait"))
    parser.add_argument("--rows", type=int, default=None, help="speed: 24,000 of 1,000 characters; memory: a million")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "data.jsonl")
    args = parser.parse_args()
    figures: Mapping[str, Json]
    if args.what == "speed":
        figures = speed(args.rows or 24_000, args.passes)
    elif args.what == "memory":
        figures = memory(args.rows or 1_000_000)
    else:
        figures = wait(args.steps, args.passes)
    append_results(args.out, [Result.of({"bench": "data", "case": args.what, **figures}, this_run())])
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
