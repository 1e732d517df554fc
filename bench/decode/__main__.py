"""`python -m bench.decode`."""

import argparse
import os
import sys
from pathlib import Path

import torch

from bench._result import RESULTS, append_results
from bench.decode._case import SHAPES, WORKLOADS
from bench.decode._run import AnswersDiffer, measure, table
from bench.decode._variants import CEILING, VARIANTS


def main() -> int:
    """Run what the command line asks for. Returns 1 if answers differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode")
    parser.add_argument("--config", choices=SHAPES, default="tiny")
    parser.add_argument("--cases", nargs="+", help="one, many, prefill; all by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--llama-cpp", type=Path, help=f"a folder with node-llama-cpp: adds the variant {CEILING}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=7, help="how often each variant is timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.jsonl")
    args = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as mpar's commands do; it holds for all variants
    torch.set_num_threads(args.threads)
    workloads = {name: each for name, each in WORKLOADS[args.config].items() if not args.cases or name in args.cases}
    names = [*args.variants, *([CEILING] if args.llama_cpp else [])]
    try:
        results = measure(args.config, SHAPES[args.config], workloads, names, args.passes, _say, args.llama_cpp)
    except AnswersDiffer as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    append_results(args.out, results)
    sys.stdout.write(table(results))
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
