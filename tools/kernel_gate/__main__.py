"""`python -m tools.kernel_gate compile`: for every chip, without a GPU; `versions`: with every Triton; `check`: on a GPU."""

import argparse
import os
import sys
from pathlib import Path

from mpar.kernels import ARCHITECTURES
from tools.kernel_gate import _ledger
from tools.kernel_gate._check import check_cases
from tools.kernel_gate._compile import compile_all, table
from tools.kernel_gate._versions import CACHE, VERSIONS, all_versions


def main() -> int:
    """Do what the command line asks for. Returns 1 if something is over its limit or wrong, else 0."""
    args = _parser().parse_args()
    if args.command == "check":
        return 1 if check_cases(sys.stdout) else 0
    if args.command == "versions":
        words = ["--update"] if args.update else []
        return 1 if all_versions(args.triton, cache=args.cache, jobs=args.jobs, compile_words=words) else 0
    return _compile(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_gate")
    commands = parser.add_subparsers(dest="command", required=True)
    offline = commands.add_parser("compile", help="compile every kernel for every chip, without a GPU, and check what comes out")
    offline.add_argument("--only", default="", metavar="NAME", help="cases whose name has this in it")
    offline.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    offline.add_argument("--changed", action="store_true", help="only kernels that differ from the ledger")
    offline.add_argument("--update", action="store_true", help="write what passes to the ledger")
    offline.add_argument("--ledger", type=Path, default=_ledger.LEDGER)
    offline.add_argument("--out", type=Path, help="folder for what the compiler wrote: ttir, ttgir, ptx, sass, ptxas")
    offline.add_argument("--jobs", type=int, default=os.cpu_count())
    versions = commands.add_parser("versions", help="compile for every chip, and run tests/kernels, with every version of Triton")
    versions.add_argument("--triton", nargs="+", default=list(VERSIONS), metavar="VERSION")
    versions.add_argument("--cache", type=Path, default=CACHE, help="where the versions are installed, each in a folder")
    versions.add_argument("--update", action="store_true", help="write what passes to the ledger")
    versions.add_argument("--jobs", type=int, default=os.cpu_count())
    commands.add_parser("check", help="run every case on the GPU that is here, against float64 and against itself")
    return parser


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
