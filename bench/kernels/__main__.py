"""`python -m bench.kernels run`: every kernel beside its peers, on a GPU; `table`: results as Markdown; `tune`: other blocks."""

import argparse
import sys
from pathlib import Path

from bench._result import RESULTS
from bench.kernels._run import run, write_table
from bench.kernels._tune import tune


def main() -> int:
    """Run what the command line asks for. Returns 1 if a row is wrong, or was not reached."""
    args = _parser().parse_args()
    if args.command == "table":
        write_table(args.out)
        return 0
    if args.command == "tune":
        return tune(args.kernel, only=args.only, write=args.write)
    options = {
        "long": args.long,
        "tiny": args.tiny,
        "seconds": args.seconds,
        "out": args.out,
        "commit": args.commit,
        "share": args.share,
    }
    return 1 if run(args.rows, **options) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("run", help="check every row of the table, and time it beside its peers on a GPU")
    timed.add_argument("--rows", type=_numbers, default=[], metavar="1,2,5", help="numbers in the table; default: all")
    timed.add_argument("--long", action="store_true", help="the long form: attention in float16, and at many lengths")
    timed.add_argument("--tiny", action="store_true", help="tiny operands on the CPU, in Triton's interpreter, without timing")
    timed.add_argument("--seconds", type=float, default=540.0, help="begin no row after this time")
    timed.add_argument("--share", type=float, default=1.0, help="how much of the usual 200 ms every variant is timed for")
    timed.add_argument("--out", type=Path, default=RESULTS, help="folder of kernels.jsonl, which grows, and kernels.md")
    timed.add_argument("--commit", default="", help="the commit, where there is no git; else the file COMMIT says it")
    tuned = commands.add_parser("tune", help="time other blocks, warps and stages of a kernel on the GPU that is here")
    tuned.add_argument("kernel", help="as in mpar/kernels/table.yaml")
    tuned.add_argument("--only", default="", metavar="NAME", help="cases whose name has this in it")
    tuned.add_argument("--write", action="store_true", help="put the fastest into the table")
    written = commands.add_parser("table", help="write kernels.md anew from kernels.jsonl")
    written.add_argument("--out", type=Path, default=RESULTS)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
