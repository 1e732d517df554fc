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

import torch.distributed as dist

from bench._launch import Launch, launch_together
from mpar.cli._ranks import MALLOC

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
    ranks: int,
    module: str,
    save: Callable[[Path], object],
    variants: Mapping[str, bool],
    arguments: Mapping[str, object],
    passes: Passes,
) -> list[Measured]:
    """Launch `module` on ranks once for each variant; they take their steps in turn. Returns an item for each pass.

    `save` writes into a folder what the ranks load. `variants` says which are mpar's: their ranks get the environment that
    `mpar train` gives ranks, the others that of a plain launch. `arguments` that are None are left out.
    """
    with tempfile.TemporaryDirectory() as work:
        save(Path(work))
        each = {"steps": passes.steps, "warmup": passes.warmup, "passes": -(-passes.passes // passes.launches)}
        given = {"work": work} | {key: value for key, value in arguments.items() if value is not None} | each
        printed = [_in_turn(ranks, module, variants, given) for _ in range(passes.launches)]
    return [_pass_of(lines) for texts in printed for lines in zip(*(text.splitlines() for text in texts), strict=True)]


def _in_turn(ranks: int, module: str, variants: Mapping[str, bool], given: Mapping[str, object]) -> list[str]:
    """What rank 0 of each variant printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = []
    for variant, ours in variants.items():
        told = {**given, "variants": variant, "order": ",".join(variants), "turns": f"127.0.0.1:{store.port}"}
        words = [word for key, value in told.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        launches.append(Launch(ranks, module, words, MALLOC if ours else {}))
    return launch_together(launches)


def _pass_of(lines: Sequence[str]) -> Measured:
    """A pass, of what each variant printed of it."""
    found = [json.loads(line) for line in lines]
    own, everything, seconds = sum(one["own_s"] for one in found), found[0]["all_s"], found[0]["seconds"]
    names = [one["variant"] for one in found]
    ranks = [dict(zip(names, each, strict=True)) for each in zip(*(one["ranks"] for one in found), strict=True)]
    return {"foreign_cores": round(max(0.0, (everything - own) / seconds), 3), "ranks": ranks}


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
