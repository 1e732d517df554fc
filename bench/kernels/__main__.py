"""`python -m bench.kernels compile`: for every chip, without a GPU; `run`: beside peers, on a GPU; `versions`, `tune`."""

import argparse
import os
import sys
from pathlib import Path

from bench._report import RESULTS
from bench.kernels import _ledger
from bench.kernels._compile import compile_all, table
from bench.kernels._run import run, write_table
from bench.kernels._tune import tune
from bench.kernels._versions import CACHE, VERSIONS, all_versions
from mpar.kernels import ARCHITECTURES


def main() -> int:
    """Run what the command line asks for; 1 if something is over its limit or wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    offline = commands.add_parser("compile", help="compile every kernel for every chip, without a GPU, and check what comes out")
    offline.add_argument("--only", default="", metavar="NAME", help="cases whose name has this in it")
    offline.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    offline.add_argument("--changed", action="store_true", help="only kernels that differ from the ledger")
    offline.add_argument("--update", action="store_true", help="write what passes to the ledger")
    offline.add_argument("--ledger", type=Path, default=_ledger.LEDGER)
    offline.add_argument("--out", type=Path, help="folder for what the compiler wrote: ttir, ttgir, ptx, sass, ptxas")
    offline.add_argument("--jobs", type=int, default=os.cpu_count())
    timed = commands.add_parser("run", help="check every row of the table, and time it beside its peers on a GPU")
    timed.add_argument("--rows", type=_numbers, default=[], metavar="1,2,5", help="numbers in the table; default: all")
    timed.add_argument("--long", action="store_true", help="the long form: attention in float16, and at many lengths")
    timed.add_argument("--tiny", action="store_true", help="tiny operands on the CPU, in Triton's interpreter, without timing")
    timed.add_argument("--seconds", type=float, default=540.0, help="begin no row after this time")
    timed.add_argument("--share", type=float, default=1.0, help="how much of the usual 200 ms every variant is timed for")
    timed.add_argument("--out", type=Path, default=RESULTS, help="folder of kernels.jsonl, which grows, and kernels.md")
    timed.add_argument("--commit", default="", help="what is measured, where there is no git; else the file COMMIT says it")
    versions = commands.add_parser("versions", help="compile for every chip, and run tests/kernels, with every version of Triton")
    versions.add_argument("--triton", nargs="+", default=list(VERSIONS), metavar="VERSION")
    versions.add_argument("--cache", type=Path, default=CACHE, help="where the versions are installed, each in a folder")
    versions.add_argument("--update", action="store_true", help="write what passes to the ledger")
    versions.add_argument("--jobs", type=int, default=os.cpu_count())
    tuned = commands.add_parser("tune", help="time other blocks, warps and stages of a kernel on the GPU that is here")
    tuned.add_argument("kernel", help="as in mpar/kernels/table.yaml")
    tuned.add_argument("--only", default="", metavar="NAME", help="cases whose name has this in it")
    tuned.add_argument("--write", action="store_true", help="put the fastest into the table")
    written = commands.add_parser("table", help="write kernels.md anew from kernels.jsonl")
    written.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.command == "table":
        write_table(args.out)
        return 0
    if args.command == "tune":
        return tune(args.kernel, only=args.only, write=args.write)
    if args.command == "versions":
        words = ["--update"] if args.update else []
        return 1 if all_versions(args.triton, cache=args.cache, jobs=args.jobs, compile_words=words) else 0
    if args.command == "run":
        options = {
            "long": args.long,
            "tiny": args.tiny,
            "seconds": args.seconds,
            "out": args.out,
            "commit": args.commit,
            "share": args.share,
        }
        return 1 if run(args.rows, **options) else 0
    return _compile(args)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _compile(args: argparse.Namespace) -> int:
    version, results, messages = compile_all(
        args.arch,
        only=args.only,
        changed=args.changed,
        update=args.update,
        out=args.out,
        jobs=args.jobs,
        ledger=args.ledger,
    )
    sys.stdout.write(table(results, _ledger.read(args.ledger, version)))
    sys.stdout.writelines(f"FAILED {message}\n" for message in messages)
    sys.stdout.write(f"Triton {version}: {len(results)} kernels compiled, {len(messages)} failures\n")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
