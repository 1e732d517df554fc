"""`python -m bench.parallel context --ranks 4`, `python -m bench.parallel experts --ranks 4`."""

import argparse
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LossesDiffer
from bench._passes import Passes
from bench._peers import PeersMissing, find_peers
from bench._result import RESULTS, append_results
from bench.parallel._run import run
from bench.parallel._subjects import SUBJECTS
from bench.parallel._table import table


def main() -> int:
    """Run what the command line asks for. Returns 1 if the peers are missing, a rank failed or losses differ."""
    args = _parser().parse_args()
    subject = SUBJECTS[args.subject]
    sizes = {name: vars(args)[name] for name in subject.sizes}
    try:
        folder, variants = find_peers(args.peers), args.variants.split(",")
        results = run(subject, args.config, sizes, args.ranks, variants, folder=folder, passes=Passes.of(args))
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    append_results(args.out, results)
    sys.stdout.write(table(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.parallel")
    subjects = parser.add_subparsers(dest="subject", required=True)
    for subject in SUBJECTS.values():
        one = subjects.add_parser(subject.name, help=subject.help)
        one.add_argument("--config", default="tiny")
        for name, default in subject.sizes.items():
            one.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
        one.add_argument("--ranks", type=int, default=4)
        one.add_argument("--variants", default=",".join(subject.variants), help="comma-separated")
        Passes.add_options(one, Passes(passes=5, launches=1, steps=5, warmup=2))
        one.add_argument("--out", type=Path, default=RESULTS / f"{subject.name}.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
