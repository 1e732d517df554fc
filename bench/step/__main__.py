"""`python -m bench.step run`: training steps on one GPU beside transformers; `table`: the results as Markdown."""

import argparse
import sys
from pathlib import Path

from bench._result import RESULTS
from bench.step._case import CASES, VARIANTS
from bench.step._report import bars, newest, write_table
from bench.step._run import run


def main() -> int:
    """Run what the command line asks for. Returns 1 if a row failed or was not reached, or a bar was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.step")
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("run", help="time steps of every case and variant on the GPU that is here")
    timed.add_argument("--cases", type=_names, default=[], metavar="A,B", help=", ".join(case.key for case in CASES))
    timed.add_argument("--variants", type=_names, default=[], metavar="A,B", help=", ".join(v.name for v in VARIANTS))
    timed.add_argument("--tiny", action="store_true", help="toy sizes on the CPU: everything but the figures")
    timed.add_argument("--seconds", type=float, default=540.0, help="end after this time; remaining rows are not reached")
    timed.add_argument("--profile", action="store_true", help="step_kernels.md, and traces of ours as step_*.json.gz")
    timed.add_argument("--commit", default="", help="the commit, where there is no git; else the file COMMIT says it")
    shown = commands.add_parser("table", help="write step.md from step.jsonl")
    for command in (timed, shown):
        command.add_argument("--out", type=Path, default=RESULTS, help="folder of step.jsonl, which grows, and step.md")
    args = parser.parse_args()
    if args.command == "table":
        write_table(args.out)
        return 0
    known = [case.key for case in CASES], [variant.name for variant in VARIANTS]
    unknown = [
        name for given, names in zip((args.cases, args.variants), known, strict=True) for name in given if name not in names
    ]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known[0])}, and {', '.join(known[1])}")
    options = {"tiny": args.tiny, "seconds": args.seconds, "out": args.out, "commit": args.commit, "profile": args.profile}
    results = run(args.cases, args.variants, **options)
    wrong = [result for result in results if result.text("status") not in ("ok", "missing") or result.has("cut")]
    cases = [] if args.tiny else [case for case in CASES if any(result.text("case") == case.key for result in results)]
    verdicts = [(case.key, *row) for case in cases for row in bars(case, newest(results))]
    sys.stdout.writelines(f"{key}: {bar}: {figure} {verdict}\n" for key, bar, figure, verdict in verdicts)
    return 1 if wrong or any(verdict == "missed" for *_, verdict in verdicts) else 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
