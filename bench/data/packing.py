"""`python -m bench.data.packing`: how full sequences are, and how long packing takes, beside TRL's `bfd` on the same documents.

Takes `pip install trl datasets`. The documents are random ids with lengths of three distributions. `mpar` packs all of them at
once, `mpar_1000` in windows of a thousand, as TRL does with a batch of `map`. Times are from documents in memory to all rows
having been read once; each variant's is the median of `--passes`, in turns. No document is longer than a row, so none is cut.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench._machine import this_run
from bench._result import RESULTS, Json, Result, append_results
from mpar.data import BatchShape, DocumentBatches, Documents

CAPACITY, WINDOW = 4096, 1000
DRAWS: Mapping[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "log-normal": lambda draw, count: draw.lognormal(6.0, 1.0, count),  # median 403 tokens
    "exponential": lambda draw, count: draw.exponential(900.0, count),
    "two sorts": lambda draw, count: np.where(
        draw.random(count) < 0.7, draw.normal(150, 60, count), draw.normal(1300, 300, count)
    ),
}
Run = Callable[[], tuple[float, float]]
"""Packs and reads everything; returns (the share of positions that hold a token, seconds)."""


def main() -> int:
    """Measure. Returns 1 if a variant of mpar fills less than 98 %."""
    parser = argparse.ArgumentParser(prog="python -m bench.data.packing")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "packing.jsonl")
    args = parser.parse_args()
    results = [line for name in DRAWS for line in measured(name, args.documents, args.passes)]
    append_results(args.out, results)
    for line in results:
        sys.stdout.write(json.dumps({**line.case, **line.figures}) + "\n")
    return int(any(line.number("fill") < 0.98 for line in results if line.text("variant").startswith("mpar")))


def measured(name: str, count: int, passes: int) -> list[Result]:
    """A line for each variant."""
    draw = np.random.default_rng(0)
    lengths = np.clip(DRAWS[name](draw, count).astype(np.int64), 2, CAPACITY)
    tokens = draw.integers(0, 50_000, lengths.sum(), dtype=np.int32)
    rows = np.split(tokens, np.cumsum(lengths)[:-1])
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, Run] = {
            "mpar": of_mpar(rows, len(rows)),
            "mpar_1000": of_mpar(rows, WINDOW),
            "trl": of_trl(rows, folder),
        }
        found = {variant: [run()] for variant, run in variants.items()}  # warm
        for _ in range(passes):
            for variant, run in variants.items():
                found[variant].append(run())
    figures: dict[str, Mapping[str, Json]] = {
        variant: {"documents": count, "fill": runs[0][0], "seconds": statistics.median(s for _, s in runs[1:])}
        for variant, runs in found.items()
    }
    return [
        Result({"bench": "packing", "case": name, "variant": variant}, values, this_run()) for variant, values in figures.items()
    ]


def of_mpar(rows: list[NDArray[np.int32]], window: int) -> Run:
    """mpar's packing of as many documents at a time."""

    def run() -> tuple[float, float]:
        began, positions, held = time.perf_counter(), 0, 0
        for first in range(0, len(rows), window):
            some = rows[first : first + window]
            documents = Documents.from_ids([(np.append(row, 0), np.ones(len(row) + 1, bool)) for row in some])  # type: ignore[misc]
            batches = DocumentBatches(documents, BatchShape(8, CAPACITY), vocab_size=50_000)
            for step in range(batches.steps_per_epoch):
                held += int((batches.batch(step)["documents"] >= 0).sum())
            positions += batches.num_sequences * CAPACITY
        return held / positions, time.perf_counter() - began

    return run


def of_trl(rows: list[NDArray[np.int32]], folder: str) -> Run:
    """TRL's `pack_dataset`, whose results of an earlier pass are not reused."""
    import datasets
    import trl

    datasets.disable_caching()
    datasets.disable_progress_bars()
    source = datasets.Dataset.from_dict({"input_ids": rows})
    source.save_to_disk(folder)  # so that `map` reads it as it reads data of any size
    source = datasets.load_from_disk(folder)

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        packed = trl.pack_dataset(source, CAPACITY, "bfd").with_format("numpy")
        held = sum(len(row) for batch in packed.iter(batch_size=8) for row in batch["input_ids"])
        return held / (len(packed) * CAPACITY), time.perf_counter() - began

    return run


if __name__ == "__main__":
    sys.exit(main())
