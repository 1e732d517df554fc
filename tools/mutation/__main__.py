"""The command line of mutation runs."""

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools import mutation
from tools.mutation._copy import Copy
from tools.mutation._coverage_map import CoverageMap, read_coverage
from tools.mutation._draw import draw
from tools.mutation._mutants import Mutant
from tools.mutation._report import Report, print_report, read_equivalents, read_report
from tools.mutation._run import Outcome, Verdict, control, try_mutants
from tools.mutation._tree import find_sources, key_of, source_at

KEPT = Path(".mutation")
MAP_TIMEOUT_S = 24 * 3600.0
BUDGET = 1 / 3
"""The share of a mutant's time limit that its tests may have taken for the map; starting pytest and imports take the rest."""


def main() -> None:
    """Parse the command line, and run."""
    options = _parser().parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with Ctrl-C ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: copies are deleted, results so far printed
    console = Console()
    try:
        _run(options, console)
    except KeyboardInterrupt:
        console.print("interrupted before any mutant was tried")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutation", description=mutation.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mutants", type=int, default=60, metavar="N", help="how many mutants to draw (60)")
    add("--seed", type=int, default=0, help="seed of the draw (0): the same files and seed give the same mutants")
    add("--files", default="mpar/**/*.py", metavar="GLOB", help="which files to change (mpar/**/*.py); quote it")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="time limit for the tests of one mutant (60)")
    add("--jobs", type=int, default=2, metavar="N", help="how many mutants to try at once, each in its own copy (2)")
    add("--out", type=Path, default=KEPT / "report.json", metavar="FILE", help="the report, as JSON (.mutation/report.json)")
    add("--resume", action="store_true", help="go on from the report: mutants that are in it are not tried again")
    add("--map", type=Path, metavar="FILE", help="use this coverage map; it may be of an older commit: unchanged lines are found")
    add(
        "--map-tests",
        default="",
        metavar="WORDS",
        help="arguments that pytest gets when the map is made, such as \"--full -n 2 -m 'not gloo'\"; write --map-tests=\"...\"",
    )
    add("--list", action="store_true", help="print the mutants and the number of tests for each, and try none")
    add("--root", type=Path, default=Path(), metavar="FOLDER", help="the repository (default: this folder)")
    return parser


def _run(options: argparse.Namespace, console: Console) -> None:
    root = options.root.resolve()
    sources = find_sources(root, options.files)
    if not sources:
        sys.exit(f"no Python file of {root} that git knows matches {options.files!r}")
    key = key_of(root)
    coverage_map = _map(options, root, key, sources, console)
    mutants = draw(sources, options.mutants, options.seed)
    out = root / options.out
    report = Report(key, options.seed, _known(out, key, mutants) if options.resume else [])
    known = {outcome.mutant for outcome in report.outcomes}
    for mutant, reason in read_equivalents(Path(__file__).with_name("equivalent.yaml"), mutants).items():
        if mutant not in known:
            report.outcomes.append(Outcome(mutant, Verdict.EQUIVALENT, reason))
    known = {outcome.mutant for outcome in report.outcomes}
    choices = {mutant: coverage_map.choose(mutant, BUDGET * options.timeout) for mutant in mutants if mutant not in known}
    if options.list:
        for mutant, choice in choices.items():
            console.print(f"{mutant.name} ({len(choice.tests)} tests)", markup=False, highlight=False, soft_wrap=True)
        return
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    stop = threading.Event()
    try:
        copies = [Copy(root, folder / str(number)) for number in range(min(options.jobs, max(len(choices), 1)))]
        with console.status("running tests on the copy as it is"):
            broken = control(copies[0], list(choices.values()), options.timeout, stop) if choices else None
        if broken is not None:
            sys.exit(f"tests fail without any mutant, so their failures would say nothing:\n{broken}")
        with _progress(console) as progress:
            task = progress.add_task("", total=len(mutants), completed=len(report.outcomes))

            def note(outcome: Outcome) -> None:
                report.outcomes.append(outcome)
                report.save(out)
                progress.update(task, advance=1, description=_counts(report))

            try_mutants(copies, choices, options.timeout, note, stop)
    except KeyboardInterrupt:
        console.print(f"interrupted; --resume goes on from {options.out}")
    finally:
        stop.set()
        shutil.rmtree(folder, ignore_errors=True)
    report.save(out)
    print_report(console, report.outcomes)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console)


def _counts(report: Report) -> str:
    counts = {verdict: sum(outcome.verdict == verdict for outcome in report.outcomes) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _known(path: Path, key: str, mutants: list[Mutant]) -> list[Outcome]:
    """The outcomes that a report of the same tree has for these mutants."""
    if not path.exists():
        return []
    report = read_report(path)
    if report.key != key:
        sys.exit(f"{path} is of tree {report.key}, this is {key}: it cannot be resumed")
    return [outcome for outcome in report.outcomes if outcome.mutant in set(mutants)]


def _map(options: argparse.Namespace, root: Path, key: str, sources: dict[str, str], console: Console) -> CoverageMap:
    """The coverage map of a tree: the one that the command line names, else one that an earlier run kept, else a new one."""
    path = options.map or root / KEPT / f"map-{key}.json.gz"
    if options.map is None and not path.exists():
        console.print(f"making the coverage map {path.relative_to(root)}: one run of the tests")
        _make_map(options, root, key).save(path)
    coverage_map = CoverageMap.load(path)
    if coverage_map.key != key:
        for file, now in sources.items():
            then = source_at(root, coverage_map.key.partition("-")[0], file)
            if then is not None and then != now:
                coverage_map.follow(file, then, now)
    return coverage_map


def _make_map(options: argparse.Namespace, root: Path, key: str) -> CoverageMap:
    """Run the tests in a copy, and make a map of the lines that each test runs. Tests that fail are not in the map."""
    folder = Path(tempfile.mkdtemp(prefix="mutation-map-"))
    try:
        copy = Copy(root, folder / "copy")
        data, durations = folder / "coverage", folder / "durations.json"
        words = [f"--note-durations={durations}", f"--cov={options.files.partition('/')[0]}", "--cov-context=test"]
        words += ["--cov-report=", *shlex.split(options.map_tests)]
        stop = threading.Event()
        copy.pytest(words, MAP_TIMEOUT_S, stop, show=True, also={"COVERAGE_FILE": str(data)})
        if not data.exists() or not durations.exists():
            sys.exit("the run of the tests left no coverage behind; see what pytest says above")
        return read_coverage(key, data, durations, copy.root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
