"""`python -m bench.moe layer`."""

import argparse
import sys
from pathlib import Path

from bench._result import RESULTS, append_results
from bench.moe._layer import ResultsDiffer, layer, table
from bench.moe._variants import Case


def main() -> int:
    """Run what the command line asks for. Returns 1 if results differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.moe")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("layer", help="the layer's forward and backward beside a dense one and transformers' experts")
    one.add_argument("--tokens", type=int, default=4096)
    one.add_argument("--d", type=int, default=512)
    one.add_argument("--mlp", type=int, nargs="+", default=[1024], help="hidden sizes of an expert, one case each")
    one.add_argument("--experts", type=int, default=8)
    one.add_argument("--top-k", type=int, default=2)
    one.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    one.add_argument("--passes", type=int, default=5)
    one.add_argument("--steps", type=int, default=7)
    one.add_argument("--out", type=Path, default=RESULTS / "moe.jsonl")
    args = parser.parse_args()
    try:
        for mlp in args.mlp:
            case = Case(args.tokens, args.d, mlp, args.experts, args.top_k)
            sys.stdout.write(
                f"floor of {case}: {case.flops / 1e9:.1f} GFLOP in products, {case.moved_bytes / 1e6:.0f} MB to carry rows\n"
            )
            for threads in args.threads:
                results = layer(case, threads, passes=args.passes, steps=args.steps)
                append_results(args.out, results)
                sys.stdout.write(table(results))
                sys.stdout.flush()
    except ResultsDiffer as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
