"""`python -m bench.slow_links wire | steps`: collectives, and training steps beside torch, on ranks behind slow links."""

import argparse
import json
import math
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LossesDiffer
from bench._passes import Passes
from bench._peers import PeersMissing, find_peers
from bench._result import RESULTS, append_results
from bench._workload import MESHES
from bench.slow_links._links import LinkError, bits_per_s
from bench.slow_links._measured import measure_steps, measure_wire


def main() -> int:
    """Measure, print and record. Returns 1 if there can be no links, peers are missing, a rank failed or losses differ."""
    try:
        args = _arguments()
        if args.command == "wire":
            todo = (measure_wire(num_ranks, args.rate, args.numbers, args.repeats) for num_ranks in args.ranks)
        else:
            folder, variants = find_peers(args.peers), args.variants.split(",")
            if "torch_async" in variants and not all(mesh.startswith("fsdp") for mesh in args.mesh):
                raise LinkError("torch_async is FSDP2 with asynchronous gathers: give it meshes of fsdp, or leave it out")
            meshes = [name.replace("_sp", "+sp") for name in args.mesh]
            options = {"bucket_bytes": args.mpar_bucket_bytes, "prefetch_bytes": args.mpar_prefetch_bytes}
            options |= {"paired": True} if args.mpar_paired else {}
            how = (args.rates, variants, args.bucket_mb, folder, Passes.of(args), options)
            todo = (measure_steps(args.config, mesh, *how) for mesh in meshes)
        for results in todo:
            append_results(args.out, results)
            for result in results:
                sys.stdout.write(json.dumps({**result.case, **result.figures}) + "\n")
                sys.stdout.flush()
    except (LinkError, RankFailed, PeersMissing, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.slow_links")
    commands = parser.add_subparsers(dest="command", required=True)
    wire = commands.add_parser("wire", help="time of each collective over the time of its bytes")
    wire.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    wire.add_argument("--rate", default="100mbit", help="of every link and direction: 50mbit, 1gbit")
    wire.add_argument("--numbers", type=int, default=400_000, help="fp32 values that a rank sends to each other")
    wire.add_argument("--repeats", type=int, default=5)
    steps = commands.add_parser("steps", help="training steps, and how much of their communication is hidden")
    steps.add_argument("--config", default="tiny")
    steps.add_argument("--mesh", nargs="+", default=["dp2"], help=", ".join(name.replace("+", "_") for name in MESHES))
    steps.add_argument("--rates", nargs="+", default=["200mbit"])
    names = "mpar, mpar:STRATEGY, mpar:SCHEDULE, torch, torch_bucket, torch_async; ratios are those of the first, if it is mpar's"
    steps.add_argument("--variants", default="mpar,torch,torch_bucket", help=names)
    steps.add_argument("--bucket-mb", type=float, default=1.0, help="of torch_bucket")
    steps.add_argument("--mpar-bucket-bytes", type=int, default=1 << 20)
    steps.add_argument("--mpar-prefetch-bytes", type=int, default=1 << 30)
    steps.add_argument("--mpar-paired", action="store_true", help="two halves of a batch at a time, compiled for the first rate")
    Passes.add_options(steps, Passes(passes=5, launches=1, steps=3, warmup=2))
    for command in (wire, steps):
        command.add_argument("--out", type=Path, default=RESULTS / "slow_links.jsonl")
    args = parser.parse_args()
    for rate in [args.rate] if args.command == "wire" else args.rates:
        if math.isinf(bits_per_s(rate)):
            parser.error("give rates: without a limit there is nothing to compare with")
    return args


if __name__ == "__main__":
    sys.exit(main())
