"""`python -m bench.functions run` and `gspmd`."""

import argparse
import sys
from pathlib import Path

from bench._machine import this_run
from bench._result import RESULTS, Result, append_results, read_results
from bench.functions._all import FUNCTIONS
from bench.functions._case import MESHES
from bench.functions._run import run
from bench.functions._table import gspmd_line, page, result_lines, table, totals, traffic_of


def main() -> int:
    """Run what the command line asks for. Returns 1 if a function is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m bench.functions")
    commands = parser.add_subparsers(dest="command", required=True)
    ours = commands.add_parser("run", help="compile, simulate and compare every function, and count what its ranks exchange")
    ours.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME")
    ours.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    ours.add_argument("--messages", action="store_true", help="the whole message of every function that is not exact")
    theirs = commands.add_parser("gspmd", help="compile 30 of them in JAX and count what XLA's devices exchange")
    for command in (ours, theirs):
        command.add_argument(
            "--out", type=Path, default=RESULTS / "functions.jsonl", help="lines of the same functions there are replaced"
        )
    args = parser.parse_args()
    return _gspmd(args.out) if args.command == "gspmd" else _run(args)


def _run(args: argparse.Namespace) -> int:
    outcomes = [outcome for name in args.functions for mesh in args.meshes for outcome in run(FUNCTIONS[name], mesh)]
    gspmd = traffic_of(read_results(args.out))
    _replace(args.out, result_lines(outcomes, this_run()))
    args.out.with_suffix(".md").write_text(page(read_results(args.out)), encoding="utf-8")
    sys.stdout.write(table(outcomes, gspmd, messages=args.messages) + totals(outcomes, gspmd))
    return int(any(outcome.verdict in ("wrong", "crash") for outcome in outcomes))


def _gspmd(out: Path) -> int:
    from bench.functions import _gspmd as jax_side  # JAX is needed for this command alone

    jax_side.start_devices()
    lines = []
    for name in jax_side.TWINS:
        jax_side.check_twin(FUNCTIONS[name])
        lines.append(gspmd_line(name, {mesh: jax_side.traffic(FUNCTIONS[name], mesh) for mesh in MESHES}, this_run()))
        sys.stdout.write(f"{name}: {lines[-1].figures}\n")
    _replace(out, lines)
    return 0


def _replace(path: Path, lines: list[Result]) -> None:
    """Write lines to a file in place of those that have the same case."""
    cases = [line.case for line in lines]
    kept = [line for line in read_results(path) if line.case not in cases]
    path.unlink(missing_ok=True)
    append_results(path, [*kept, *lines])


if __name__ == "__main__":
    sys.exit(main())
