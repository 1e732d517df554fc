"""`python -m bench.imported [--kind llama ...] [--ranks 2]`: steps of traced models beside others."""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LossesDiffer, largest_spread
from bench._machine import this_run
from bench._passes import Measured, Passes, columns, launched, median_ms
from bench._peers import PeersMissing, find_peers
from bench._result import RESULTS, Json, Result, report_results
from bench._statistics import paired_ratio
from bench.imported._subject import DECLARED, KINDS, SIZES, save_programs
from mpar.program import Program

_BARS = {"declared": 1.05, "transformers": 0.8}
"""The most that the traced step may take, over that of each other variant."""


def _summarised(config: str, ranks: int, measured: list[Measured], programs: dict[str, Program]) -> list[Result]:
    """A result for each variant: wall and CPU milliseconds, predicted peak, and the ratio of the traced model to it."""
    names = list(measured[0]["ranks"][0])
    losses = columns(measured, names, "loss", statistics.fmean)
    clocks = {"wall": columns(measured, names, "wall", max), "cpu": columns(measured, names, "cpu", sum)}
    about: dict[str, Json] = {
        **{"bench": "imported", "config": config, "ranks": ranks, "loss_spread": largest_spread(losses)},
        "foreign_cores": [each["foreign_cores"] for each in measured],
    }
    results = []
    for name in names:
        line: dict[str, Json] = {
            "variant": name,
            **{f"{key}_ms": round(median_ms(clock[name]), 2) for key, clock in clocks.items()},
        }
        if name in programs:
            line["peak_bytes"] = max(programs[name].peaks())
        if name in _BARS:
            ratios = {f"traced_over_this_{key}": paired_ratio(clock["traced"], clock[name]) for key, clock in clocks.items()}
            line |= {key: ratio.rounded() for key, ratio in ratios.items()} | {"bar": _BARS[name]}
        if name == "transformers":
            line["products_over_this_cpu"] = paired_ratio(clocks["cpu"]["floor_products"], clocks["cpu"][name]).rounded()
        results.append(Result.of(about | line, this_run()))
    return results


def _measured(kind: str, size: str, args: argparse.Namespace, folder: Path) -> list[Result]:
    """The results of one kind in one size."""
    programs: dict[str, Program] = {}
    variants = {"traced": True} | ({"declared": True} if kind in DECLARED else {})
    variants |= {"transformers": False, "floor_products": False}
    measured = launched(
        args.ranks,
        "bench.imported._worker",
        lambda work: programs.update(save_programs(work, kind, size, args.ranks)),
        variants,
        {"peers": folder, "config": kind, "size": size},
        Passes.of(args),
    )
    return _summarised(f"{kind} {size}", args.ranks, measured, programs)


def main() -> int:
    """Measure each kind. Returns 1 if the peers are missing, a rank failed or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.imported")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--ranks", type=int, default=2)
    Passes.add_options(parser, Passes(passes=3, launches=1, steps=10, warmup=3))
    parser.add_argument("--out", type=Path, default=RESULTS / "imported.jsonl")
    args = parser.parse_args()
    try:
        folder = find_peers(args.peers)
        for kind, size in itertools.product(args.kind, args.size):
            report_results(args.out, _measured(kind, size, args, folder))
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
