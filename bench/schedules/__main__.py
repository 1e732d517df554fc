"""`python -m bench.schedules gloo --ranks 4 --microbatches 8`, `overhead`, `generation`, `sleep`."""

import argparse
import os
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._machine import machine
from bench._peers import PeersMissing, find_peers
from bench._report import RESULTS, append_lines
from bench.schedules._generation import FULL, PEERS, SMALL, generation
from bench.schedules._gloo import run, table
from bench.schedules._overhead import overhead
from bench.schedules._sleep import sleep
from bench.spmd._run import LossesDiffer

ALL = ["gpipe", "one_f_one_b", "interleaved", "zb1p", "zbv", "dual_pipe_v"]


def main() -> int:
    """Run what the command line asks for; 1 if the peers are missing, a rank failed or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.schedules")
    commands = parser.add_subparsers(dest="command", required=True)
    gloo = commands.add_parser("gloo", help="steps on gloo beside torch.distributed.pipelining and a floor")
    gloo.add_argument("--config", default="tiny8")
    gloo.add_argument("--ranks", type=int, default=4)
    gloo.add_argument("--microbatches", type=int, default=8)
    gloo.add_argument("--schedules", nargs="+", default=ALL)
    gloo.add_argument("--transport", choices=["backend", "shared"], default="backend")
    gloo.add_argument("--passes", type=int, default=3)
    gloo.add_argument("--launches", type=int, default=1)
    gloo.add_argument("--steps", type=int, default=6)
    gloo.add_argument("--warmup", type=int, default=2)
    gloo.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))
    cost = commands.add_parser("overhead", help="time per action over a loop by hand that calls the same segments")
    cost.add_argument("--chunks", type=int, default=4)
    cost.add_argument("--microbatches", type=int, default=32)
    cost.add_argument("--repeats", type=int, default=15)
    made = commands.add_parser("generation", help="seconds to make, lower and verify the programs of all ranks")
    made.add_argument("--torch", action="store_true", help="time torch too, for one rank, at the smaller size")
    made.add_argument("--torch-full", action="store_true", help="and at the larger one: 10 to 30 s a schedule")
    slept = commands.add_parser("sleep", help="predicted against measured makespan, with stages that sleep")
    for command in (gloo, cost, made, slept):
        command.add_argument("--out", type=Path, default=RESULTS / "schedules.jsonl")
    args = parser.parse_args()
    try:
        if args.command == "overhead":
            lines = overhead(args.chunks, args.microbatches, args.repeats)
            sys.stdout.writelines(f"{line['variant']}: {line['us_per_action']:.1f} us an action\n" for line in lines)
        elif args.command == "generation":
            sizes = ((SMALL, args.torch), (FULL, args.torch_full))
            lines = [generation(schedule, size, torch=torch) for size, torch in sizes for schedule in PEERS]
            sys.stdout.writelines(" ".join(f"{key}={value}" for key, value in line.items()) + "\n" for line in lines)
            lines = [line | machine() for line in lines]
        elif args.command == "sleep":
            lines = [line | machine() for line in sleep()]
            sys.stdout.writelines(
                f"{line['schedule']}: {line['predicted_s']:.3f} s predicted, {line['measured_s']:.3f} s measured\n"
                for line in lines
            )
        else:
            lines = run(
                args.config,
                args.ranks,
                args.microbatches,
                args.schedules,
                folder=find_peers(args.peers),
                passes=args.passes,
                launches=args.launches,
                steps=args.steps,
                warmup=args.warmup,
                transport=args.transport,
            )
            sys.stdout.write(table(lines))
        append_lines(args.out, lines)
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
