"""`python -m bench.spmd run --config nano --mesh tp4_sp`, `python -m bench.spmd table FILE`."""

import argparse
import sys
from pathlib import Path

from bench._launch import RankFailed
from bench._losses import LossesDiffer
from bench._passes import Passes
from bench._peers import PeersMissing, find_peers
from bench._result import RESULTS, append_results, read_results
from bench._workload import MESHES
from bench.spmd._run import default_variants, run
from bench.spmd._table import table


def main() -> int:
    """Run what the command line asks for. Returns 1 if the peers are missing, a rank failed or losses differ."""
    parser = _parser()
    args = parser.parse_args()
    if args.command == "table":
        sys.stdout.write(table(read_results(args.file)))
        return 0
    meshes = [name.replace("_sp", "+sp") for name in args.mesh]
    if unknown := [name for name in meshes if name not in MESHES]:
        parser.error(f"no mesh is called {unknown[0]!r}; there are {', '.join(MESHES)}")
    try:
        folder = find_peers(args.peers)
        for config in args.config:
            for mesh in meshes:
                variants = args.variants.split(",") if args.variants else default_variants(mesh, titan=not args.no_titan)
                results = run(config, mesh, folder=folder, variants=variants, passes=Passes.of(args))
                append_results(args.out, results)
                sys.stdout.write(table(results))
                sys.stdout.flush()
    except (PeersMissing, RankFailed, LossesDiffer) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.spmd")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure configs on meshes")
    one.add_argument("--config", nargs="+", default=["nano"])
    one.add_argument("--mesh", nargs="+", default=["tp2_sp"], help="tp4_sp, fsdp2xtp2_sp, dp4, ...")
    one.add_argument("--variants", help="comma-separated; default: mpar, torch, floors, torchtitan's spmd_types where it runs")
    one.add_argument("--no-titan", action="store_true")
    Passes.add_options(one, Passes(passes=5, launches=5, steps=12, warmup=3))
    one.add_argument("--out", type=Path, default=RESULTS / "spmd.jsonl")
    show = commands.add_parser("table", help="print lines as Markdown")
    show.add_argument("file", type=Path, nargs="?", default=RESULTS / "spmd.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
