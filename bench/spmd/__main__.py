"""`python -m bench.spmd run --config nano --mesh tp4_sp`, `python -m bench.spmd table FILE`."""

import argparse
import json
import os
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._peers import PeersMissing, find_peers
from bench._report import RESULTS, append_lines, table
from bench._workload import MESHES
from bench.spmd._run import LossesDiffer, default_variants, run


def main() -> int:
    """Run what the command line asks for; 1 if the peers are missing, a rank failed or losses differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.spmd")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure configs on meshes")
    one.add_argument("--config", nargs="+", default=["nano"])
    one.add_argument("--mesh", nargs="+", default=["tp2_sp"], help="tp4_sp, fsdp2xtp2_sp, dp4, ...")
    one.add_argument("--variants", help="comma-separated; default: mpar, torch, floors, torchtitan's spmd_types where it runs")
    one.add_argument("--no-titan", action="store_true")
    one.add_argument("--passes", type=int, default=5)
    one.add_argument("--launches", type=int, default=5, help="sets of fresh processes, over which the passes are spread")
    one.add_argument("--steps", type=int, default=12)
    one.add_argument("--warmup", type=int, default=3)
    one.add_argument("--peers", default=os.environ.get("MPAR_PEERS"))
    one.add_argument("--out", type=Path, default=RESULTS / "spmd.jsonl")
    show = commands.add_parser("table", help="print lines as Markdown")
    show.add_argument("file", type=Path, nargs="?", default=RESULTS / "spmd.jsonl")
    args = parser.parse_args()
    if args.command == "table":
        sys.stdout.write(table([json.loads(line) for line in args.file.read_text().splitlines()]))
        return 0
    try:
        folder = find_peers(args.peers)
        for config in args.config:
            for mesh in (name.replace("_sp", "+sp") for name in args.mesh):
                if mesh not in MESHES:
                    parser.error(f"no mesh is called {mesh!r}; there are {', '.join(MESHES)}")
                variants = args.variants.split(",") if args.variants else default_variants(mesh, titan=not args.no_titan)
                lines = run(
                    config,
                    mesh,
                    folder=folder,
                    variants=variants,
                    passes=args.passes,
                    launches=args.launches,
                    steps=args.steps,
                    warmup=args.warmup,
                )
                append_lines(args.out, lines)
                sys.stdout.write(table(lines))
                sys.stdout.flush()
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
