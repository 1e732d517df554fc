"""What a run found: written as JSON, from which a later run can go on, and printed by file."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.mutation._mutants import Mutant
from tools.mutation._run import Outcome, Verdict

__all__ = ["Report", "print_report", "read_equivalents", "read_report"]


@dataclass
class Report:
    """The outcomes of a run over the tree that `key` names."""

    key: str
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the report. If writing fails, the old file stays as it was."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".draft")
        draft.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)


def read_report(path: Path) -> Report:
    """A report that a run has written."""
    words = json.loads(path.read_text(encoding="utf-8"))
    outcomes = [
        Outcome(**{**outcome, "mutant": Mutant(**outcome["mutant"]), "verdict": Verdict(outcome["verdict"])})
        for outcome in words["outcomes"]
    ]
    return Report(words["key"], words["seed"], outcomes)


def read_equivalents(path: Path, mutants: Iterable[Mutant]) -> dict[Mutant, str]:
    """The mutants that a file lists as equivalent, each with the reason that the file gives.

    An entry names a line by its function and its text, not by its number, so that it still holds when code moves.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []
    reasons = {(e["scope"], e["before"].strip(), e["after"].strip()): e["reason"] for e in entries or ()}
    found = {mutant: reasons.get((mutant.scope, mutant.before.strip(), mutant.after.strip())) for mutant in mutants}
    return {mutant: reason for mutant, reason in found.items() if reason is not None}


def print_report(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print counts by folder, then, file by file, every mutant that no test noticed, as a diff."""
    verdicts = [*Verdict]
    table = Table("folder", *(str(verdict) for verdict in verdicts))
    folders = sorted({_folder(outcome) for outcome in outcomes})
    for folder in folders:
        counts = Counter(outcome.verdict for outcome in outcomes if _folder(outcome) == folder)
        table.add_row(folder, *(str(counts[verdict] or "") for verdict in verdicts))
    table.add_section()
    total = Counter(outcome.verdict for outcome in outcomes)
    table.add_row("all", *(str(total[verdict]) for verdict in verdicts))
    console.print(table)
    for verdict in (Verdict.SURVIVED, Verdict.UNCOVERED, Verdict.TIMED_OUT):
        _print_mutants(console, verdict, [outcome for outcome in outcomes if outcome.verdict == verdict])


def _folder(outcome: Outcome) -> str:
    return outcome.mutant.path.rpartition("/")[0]


def _print_mutants(console: Console, verdict: Verdict, outcomes: Sequence[Outcome]) -> None:
    if outcomes:
        console.print(Text(f"\n{verdict}: {len(outcomes)}", style="bold"))
    for path in sorted({outcome.mutant.path for outcome in outcomes}):
        console.print(Text(path, style="bold"))
        for outcome in sorted((o for o in outcomes if o.mutant.path == path), key=lambda o: o.mutant.line):
            mutant = outcome.mutant
            tests = f"{outcome.num_tests} tests passed" if verdict == Verdict.SURVIVED else outcome.because
            more = f", {outcome.num_left_out} more run the line" if outcome.num_left_out else ""
            console.print(Text(f"  line {mutant.line}, {mutant.scope or 'module'}: {mutant.kind}. {tests}{more}"), soft_wrap=True)
            console.print(Text(f"  - {mutant.before.strip()}", style="red"), soft_wrap=True)
            console.print(Text(f"  + {mutant.after.strip()}", style="green"), soft_wrap=True)
