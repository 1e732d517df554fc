"""`python -m bench.predict published [--rows 1 6 36] [--families ...]`: predicted beside published speeds of large machines."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench._machine import ROOT, this_run
from bench._result import RESULTS, Json, Result, append_results
from bench.predict._predicted import Judged, judge
from bench.predict._report import summary, table
from bench.predict._rows import read_rows


def main() -> int:
    """Predict what the command line asks for; 1 if a row cannot be compiled."""
    args = _parser().parse_args()
    rows = read_rows(args.rows, args.families)
    if args.here:
        one = judge(rows[0])
        sys.stdout.write(json.dumps([one.published_s, one.predicted_s, one.exposed, one.bubble]) + "\n")
        return 0
    judged, failed = [], False
    for row in rows:
        command = [sys.executable, "-m", "bench.predict", "published", "--rows", row.number, "--families", row.family, "--here"]
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
    published.add_argument("--out", type=Path, default=RESULTS / "predict.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
