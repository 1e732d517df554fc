"""`python -m bench.schedules gloo --ranks 4 --microbatches 8`, `overhead`, `generation`, `sleep`."""

import argparse
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LossesDiffer
from bench._passes import Passes
from bench._peers import PeersMissing, find_peers
from bench._result import RESULTS, Result, append_results
from bench.schedules._generation import FULL, PEERS, SMALL, generation
from bench.schedules._gloo import Case, run, table
from bench.schedules._overhead import overhead
from bench.schedules._sleep import sleep

ALL = ["gpipe", "one_f_one_b", "interleaved", "zb1p", "zbv", "dual_pipe_v"]


def main() -> int:
    """Run what the command line asks for. Returns 1 if the peers are missing, a rank failed or losses differ."""
    args = _parser().parse_args()
    try:
        results, text = _measured(args)
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(text)
    append_results(args.out, results)
    return 0


def _measured(args: argparse.Namespace) -> tuple[list[Result], str]:
    """The results of a command, and the text that it prints about them."""
    if args.command == "overhead":
        results = overhead(args.chunks, args.microbatches, args.repeats)
        said = [f"{one.text('variant')}: {one.number('us_per_action'):.1f} us an action" for one in results]
    elif args.command == "generation":
        sizes = ((SMALL, args.torch), (FULL, args.torch_full))
        results = [generation(schedule, size, torch=torch) for size, torch in sizes for schedule in PEERS]
        said = [" ".join(f"{key}={value}" for key, value in {**one.case, **one.figures}.items()) for one in results]
    elif args.command == "sleep":
        results = sleep()
        words = "{}: {:.3f} s predicted, {:.3f} s measured"
        said = [words.format(one.text("schedule"), one.number("predicted_s"), one.number("measured_s")) for one in results]
    else:
        case = Case(args.config, args.ranks, args.microbatches, args.transport)
        results = run(case, args.schedules, folder=find_peers(args.peers), passes=Passes.of(args))
        return results, table(results)
    return results, "".join(f"{line}\n" for line in said)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.schedules")
    commands = parser.add_subparsers(dest="command", required=True)
    gloo = commands.add_parser("gloo", help="steps on gloo beside torch.distributed.pipelining and a floor")
    gloo.add_argument("--config", default="tiny8")
    gloo.add_argument("--ranks", type=int, default=4)
    gloo.add_argument("--microbatches", type=int, default=8)
    gloo.add_argument("--schedules", nargs="+", default=ALL)
    gloo.add_argument("--transport", choices=["backend", "shared"], default="backend")
    Passes.add_options(gloo, Passes(passes=3, launches=1, steps=6, warmup=2))
    cost = commands.add_parser("overhead", help="time per action over a loop by hand that calls the same segments")
    cost.add_argument("--chunks", type=int, default=4)
    cost.add_argument("--microbatches", type=int, default=32)
    cost.add_argument("--repeats", type=int, default=15)
    made = commands.add_parser("generation", help="seconds to make, lower and verify the programs of all ranks")
    made.add_argument("--torch", action="store_true", help="time torch too, for one rank, at the smaller size")
    made.add_argument("--torch-full", action="store_true", help="time torch at the larger size too: 10 to 30 s a schedule")
    slept = commands.add_parser("sleep", help="predicted against measured makespan, with stages that sleep")
    for command in (gloo, cost, made, slept):
        command.add_argument("--out", type=Path, default=RESULTS / "schedules.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
