"""Passes: sets of steps that variants take in turn on several ranks: how many there are, their launch, and their figures."""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._launch import launch

__all__ = ["Measured", "Passes", "columns", "launched", "median_ms"]

Measured = Mapping[str, Any]
"""A pass as rank 0 prints it: "foreign_cores", and in "ranks" for each rank, by variant and clock, a figure for each step."""


@dataclass(frozen=True)
class Passes:
    """How often variants are measured: passes, launches of fresh processes that share them, steps of a pass, warm-up steps."""

    passes: int
    launches: int
    steps: int
    warmup: int

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, default: "Passes") -> None:
        """Options for these numbers, and for the folder of the peers."""
        parser.add_argument("--passes", type=int, default=default.passes)
        parser.add_argument("--launches", type=int, default=default.launches, help="sets of fresh processes for the passes")
        parser.add_argument("--steps", type=int, default=default.steps)
        parser.add_argument("--warmup", type=int, default=default.warmup)
        parser.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Passes":
        """The numbers that the command line gives."""
        return cls(args.passes, args.launches, args.steps, args.warmup)


def launched(
    ranks: int, module: str, save: Callable[[Path], object], arguments: Mapping[str, object], passes: Passes
) -> list[Measured]:
    """Launch `module` on ranks. Returns what its rank 0 printed, one item for each pass.

    `save` writes into a folder what the ranks load. `arguments` that are None are left out.
    """
    with tempfile.TemporaryDirectory() as work:
        save(Path(work))
        each = {"steps": passes.steps, "warmup": passes.warmup, "passes": -(-passes.passes // passes.launches)}
        given = {"work": work} | {key: value for key, value in arguments.items() if value is not None} | each
        words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        printed = [launch(ranks, module, words) for _ in range(passes.launches)]
    return [json.loads(line) for text in printed for line in text.splitlines()]


def columns(
    measured: Sequence[Measured], names: Iterable[str], key: str, over_ranks: Callable[[Sequence[float]], float]
) -> dict[str, list[list[float]]]:
    """By variant, by pass, by step: `over_ranks` of the figures called `key` that the ranks have."""
    return {
        name: [[over_ranks(values) for values in zip(*(rank[name][key] for rank in p["ranks"]), strict=True)] for p in measured]
        for name in names
    }


def median_ms(passes: Sequence[Sequence[float]]) -> float:
    """The median step of all passes in milliseconds."""
    return 1e3 * statistics.median(seconds for steps in passes for seconds in steps)
