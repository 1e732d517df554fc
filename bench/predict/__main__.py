"""`python -m bench.predict published [--rows 1 6 36] [--families ...]`: predicted beside published speeds of large machines."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench._machine import ROOT, foreign_cpu_s, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench.predict._own import CASES, Timed, profile_here, run_case
from bench.predict._predicted import Judged, judge
from bench.predict._report import own_summary, summary, table
from bench.predict._rows import read_rows


def main() -> int:
    """Predict what the command line asks for; 1 if a row cannot be compiled."""
    args = _parser().parse_args()
    return _own(args) if args.command == "own" else _published(args)


def _own(args: argparse.Namespace) -> int:
    """Measure this machine, then predict and run every case."""
    cases = [case for case in CASES if not args.cases or case.name in args.cases]
    profiles = {
        key: profile_here(*key, lambda text: sys.stderr.write(text + "\n"))
        for key in sorted({(case.ranks, case.transport) for case in cases}, key=str)
    }
    timed = []
    for case in cases:
        busy, begun = foreign_cpu_s(), time.perf_counter()
        one = run_case(case, profiles[case.ranks, case.transport], args.steps)
        timed.append(one)
        cores = (foreign_cpu_s() - busy) / (time.perf_counter() - begun)
        figures = f"{1e3 * one.measured_s:8.1f} ms, predicted {1e3 * one.predicted_s:8.1f} ms, {100 * one.error:+6.1f} %"
        sys.stdout.write(f"{case.name:44} {figures}   {cores:.1f} cores used\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + own_summary(timed))
    append_results(args.out, [Result.of(_own_line(one), this_run()) for one in timed])
    return 0


def _own_line(one: Timed) -> dict[str, Json]:
    case = one.case
    return {
        "bench": "predict_own",
        "name": case.name,
        "mesh": dict(case.mesh),
        "ranks": case.ranks,
        "predicted_s": round(one.predicted_s, 5),
        "measured_s": round(one.measured_s, 5),
        "slowest_s": round(max(one.steps_s), 5),
    }


def _published(args: argparse.Namespace) -> int:
    rows = read_rows(args.rows, args.families)
    if args.paired:
        rows = [replace(row, role="paired") for row in rows]
    if args.here:
        one = judge(rows[0])
        sys.stdout.write(json.dumps([one.published_s, one.predicted_s, one.exposed, one.bubble]) + "\n")
        return 0
    judged, failed = [], False
    for row in rows:
        command = [sys.executable, "-m", "bench.predict", "published", "--rows", row.number, "--families", row.family, "--here"]
        command += ["--paired"] * args.paired
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(f"row {row.number} of {row.family}: {done.stderr.strip().splitlines()[-1]}\n")
            failed = True
            continue
        judged.append(Judged(row, *json.loads(done.stdout)))
        sys.stdout.write(table(judged[-1:]).splitlines()[-1] + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + summary(judged))
    append_results(args.out, [Result.of(_line(one), this_run()) for one in judged])
    return int(failed)


def _line(one: Judged) -> dict[str, Json]:
    row = one.row
    return {
        "bench": "predict",
        "number": row.number,
        "name": row.family,
        "mesh": dict(row.mesh),
        "ranks": row.num_ranks,
        "role": row.role,
        "published_s": round(one.published_s, 4),
        "predicted_s": round(one.predicted_s, 4),
        "exposed": round(one.exposed, 4),
        "bubble": round(one.bubble, 4),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.predict")
    commands = parser.add_subparsers(dest="command", required=True)
    published = commands.add_parser("published", help="predicted beside published speeds of large machines")
    published.add_argument("--rows", nargs="+", default=[], help="their numbers; all unless given")
    published.add_argument("--families", nargs="+", default=[])
    published.add_argument("--here", action="store_true", help="predict one row in this process, and print the figures alone")
    published.add_argument("--paired", action="store_true", help="what pairs of microbatches would gain (schedule.paired)")
    published.add_argument("--out", type=Path, default=RESULTS / "predict.jsonl")
    own = commands.add_parser("own", help="steps of this machine, predicted from `mpar measure`, then run")
    own.add_argument("--cases", nargs="+", default=[], help="their names; all unless given")
    own.add_argument("--steps", type=int, default=15)
    own.add_argument("--out", type=Path, default=RESULTS / "predict.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
