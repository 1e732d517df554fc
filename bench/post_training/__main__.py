"""`python -m bench.post_training [--case lora dpo dpo_lora] [--ranks 1 2]`: steps of LoRA and DPO beside PEFT and TRL."""

import argparse
import importlib.metadata
import itertools
import statistics
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LOSS_TOLERANCE, LossesDiffer, largest_spread
from bench._machine import this_run
from bench._passes import Measured, Passes, columns, launched, median_ms
from bench._peers import PeersMissing, find_peers, peer
from bench._result import RESULTS, Json, Result, report_results
from bench._statistics import paired_ratio
from bench.post_training._subject import CASES, save_program, save_start
from mpar.mesh import Mesh

_BARS = {1: 0.9, 2: 0.6}
"""The most that a step may take, over that of the peer, by the number of ranks."""
_PAIRS_TOLERANCE = 5e-4
"""Of losses of pairs, which are made of differences of sums of 1,700 nats: these are rounded by 1e-4 in float32."""
_PEERS = {"lora": "peft", "dpo": "trl", "dpo_lora": "trl"}


def _summarised(case: str, measured: list[Measured], args: argparse.Namespace, about: dict[str, Json]) -> list[Result]:
    """A result for each variant: wall and CPU milliseconds, and beside the peer's the ratio of mpar to it."""
    names = list(measured[0]["ranks"][0])
    losses = columns(measured, names, "loss", statistics.fmean)
    clocks = {"wall": columns(measured, names, "wall", max), "cpu": columns(measured, names, "cpu", sum)}
    spread = largest_spread(losses, LOSS_TOLERANCE if case == "lora" else _PAIRS_TOLERANCE)
    about = about | {"loss_spread": spread, "foreign_cores": [each["foreign_cores"] for each in measured]}
    results = []
    for name in names:
        line: dict[str, Json] = {"variant": name}
        line |= {f"{key}_ms": round(median_ms(clock[name]), 2) for key, clock in clocks.items()}
        if name != "mpar":
            package = _PEERS[case]
            line |= {f"mpar_over_this_{key}": paired_ratio(clock["mpar"], clock[name]).rounded() for key, clock in clocks.items()}
            line |= {"version": f"{package} {importlib.metadata.version(package)}", "bar": _BARS.get(int(str(about["ranks"])))}
        results.append(Result.of(about | line, this_run()))
    return results


def _measured(case: str, ranks: int, lengths: str, args: argparse.Namespace, folder: Path) -> list[Result]:
    """The results of a case on so many ranks. Parameters are sharded where the peer shards them."""
    workload = peer(folder, "workload")
    cfg = workload.CONFIGS[args.config]
    sharded = case == "lora"
    mesh, strategy = (Mesh(fsdp=ranks), "zero3") if sharded and ranks > 1 else (Mesh(dp=ranks), "ddp")

    def save(work: Path) -> None:
        save_start(work, cfg, workload)
        save_program(work, case, cfg, mesh, strategy, cfg.batch if case == "lora" else cfg.batch // 2)

    variants = {"mpar": True, _PEERS[case]: False}
    given = {"peers": folder, "config": args.config, "case": case, "lengths": lengths}
    measured = launched(ranks, "bench.post_training._worker", save, variants, given, Passes.of(args))
    about: dict[str, Json] = {"bench": "post_training", "config": args.config, "case": case, "ranks": ranks}
    about |= {"mesh": f"{'fsdp' if sharded else 'dp'}{ranks}", "lengths": lengths}
    return _summarised(case, measured, args, about)


def main() -> int:
    """Measure each case on each number of ranks. Returns 1 if the peers are missing, a rank failed or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.post_training")
    parser.add_argument("--config", default="tiny", choices=("nano", "tiny"))
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(_BARS))
    parser.add_argument("--lengths", nargs="+", default=["equal"], choices=("equal", "mixed"), help="of the answers of dpo")
    Passes.add_options(parser, Passes(passes=3, launches=1, steps=8, warmup=3))
    parser.add_argument("--out", type=Path, default=RESULTS / "post_training.jsonl")
    args = parser.parse_args()
    try:
        folder = find_peers(args.peers)
        for case, ranks, lengths in itertools.product(args.case, args.ranks, args.lengths):
            if case == "lora" and lengths != args.lengths[0]:
                continue
            report_results(args.out, _measured(case, ranks, lengths, args, folder))
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
