"""`python -m bench.functions`."""

import argparse
import sys
from pathlib import Path

from bench._machine import this_run
from bench._result import RESULTS, append_results
from bench.functions._all import FUNCTIONS
from bench.functions._case import MESHES
from bench.functions._run import run
from bench.functions._table import result_of, table, totals


def main() -> int:
    """Run what the command line asks for. Returns 1 if a function is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m bench.functions")
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--messages", action="store_true", help="the whole message of every function that is not exact")
    parser.add_argument("--out", type=Path, default=RESULTS / "functions.jsonl")
    args = parser.parse_args()
    outcomes = [outcome for name in args.functions for mesh in args.meshes for outcome in run(FUNCTIONS[name], mesh)]
    append_results(args.out, [result_of(outcome, this_run()) for outcome in outcomes])
    sys.stdout.write(table(outcomes, messages=args.messages) + totals(outcomes))
    return int(any(outcome.verdict in ("wrong", "crash") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
