"""`python -m bench.experts gloo --ranks 4`."""

import argparse
import os
import sys
from pathlib import Path

from bench._beside import table
from bench._launch import RankFailed
from bench._peers import PeersMissing, find_peers
from bench._report import RESULTS, append_lines
from bench.experts._case import VARIANTS
from bench.experts._run import run
from bench.spmd._run import LossesDiffer


def main() -> int:
    """Run what the command line asks for; 1 if the peers are missing, a rank failed or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.experts")
    commands = parser.add_subparsers(dest="command", required=True)
    gloo = commands.add_parser("gloo", help="steps beside plain torch and DTensor, in the same processes")
    gloo.add_argument("--config", default="tiny")
    gloo.add_argument("--experts", type=int, default=8)
    gloo.add_argument("--top-k", type=int, default=2)
    gloo.add_argument("--ranks", type=int, default=4)
    gloo.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    gloo.add_argument("--passes", type=int, default=5)
    gloo.add_argument("--launches", type=int, default=1)
    gloo.add_argument("--steps", type=int, default=5)
    gloo.add_argument("--warmup", type=int, default=2)
    gloo.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))
    gloo.add_argument("--out", type=Path, default=RESULTS / "experts.jsonl")
    args = parser.parse_args()
    try:
        lines = run(
            args.config,
            args.experts,
            args.top_k,
            args.ranks,
            args.variants.split(","),
            folder=find_peers(args.peers),
            passes=args.passes,
            launches=args.launches,
            steps=args.steps,
            warmup=args.warmup,
        )
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    append_lines(args.out, lines)
    sys.stdout.write(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
