"""The command line of the survey of torch's operators."""

import argparse
import json
import logging
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tools import opinfo
from tools.opinfo._cases import outcomes_of
from tools.opinfo._page import write_page
from tools.opinfo._samples import ENTRIES


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tools.opinfo", description=opinfo.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    survey = commands.add_parser("survey", help="compile all samples and write what became of each as JSON")
    survey.add_argument("file", type=Path)
    survey.add_argument("names", nargs="*", help="only entries whose name contains one of these")
    survey.add_argument("--samples", type=int, default=4, help="how many samples of each entry, each with its gradient")
    survey.add_argument("--cases", type=int, default=7, help="how many ways to shard each sample")
    page = commands.add_parser("page", help="write the lists of docs/torch_ops.md")
    page.add_argument("--samples", type=int, default=2, help="how many samples of each entry, each with its gradient")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    if options.command == "page":
        write_page(options.samples)
        return
    names = [name for name in ENTRIES if not options.names or any(part in name for part in options.names)]
    found = {name: list(outcomes_of(name, options.samples, options.cases)) for name in names}
    options.file.write_text(json.dumps({name: [asdict(outcome) for outcome in rows] for name, rows in found.items()}, indent=1))
    for way in ("sample", "gradient"):
        counts = Counter(outcome.kind for rows in found.values() for outcome in rows if outcome.label.startswith(way))
        sharding = sum(any(o.kind == "sharded" and o.label.startswith(way) for o in rows) for rows in found.values())
        print(f"{way}: {dict(counts.most_common())}; {sharding} of {len(found)} entries shard some dim without gathering")


if __name__ == "__main__":
    main()
