"""The command line of the comparison with TRL."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import trl
from tools.trl._cases import CASES, ROWS, Case
from tools.trl._mpar import answer, save_models

_ASK = Path(__file__).with_name("_ask.py")
_CLOSE = 2e-5
"""Numbers that differ by no more than this, of the larger if that is above 1, are equal: TRL computes in float32."""
_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "kl")


def main() -> int:
    """Ask every version, print the table. Returns 1 if a number is not as `CASES` says."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.trl", description=trl.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter that has TRL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save_models(folder)
        ours = {name: answer(case.task, folder) for name, case in CASES.items()}
        theirs = dict(_asked(python, folder) for python in options.pythons)
    lines, problems = _table(ours, theirs)
    sys.stdout.write("\n".join([*lines, *(["", *problems] if problems else [])]) + "\n")
    return 1 if problems else 0


def _asked(python: str, folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The version that an interpreter has, and its answers by the names of cases."""
    version = subprocess.run(
        [python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    file = folder / f"{version}.json"
    file.write_text(json.dumps({"rows": ROWS, "cases": {name: case.asked(version) for name, case in CASES.items()}}))
    done = subprocess.run([python, str(_ASK), str(folder), str(file)], capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"{python} {_ASK} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["version"], found["answers"]


def _table(
    ours: Mapping[str, tuple[float, Mapping[str, float]]], theirs: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """The lines of the table, and what is not as it should be."""
    lines = [f"| loss | mpar |{''.join(f' TRL {version} |' for version in theirs)} why, and metrics that differ |"]
    lines.append("| --- |" + " --- |" * (len(theirs) + 2))
    problems = []
    for name, (loss, means) in ours.items():
        cells, reasons = [], []
        for version, answers in theirs.items():
            found, reason = answers[name], _reason(CASES[name], version)
            if "missing" in found:
                cells.append("refused")
                continue
            same = _close(loss, found["loss"])
            cells.append("equal" if same else f"{found['loss']:.6f}")
            if same == (reason is not None):
                problems.append(f"{name}: mpar {loss:.7f}, TRL {version} {found['loss']:.7f}, expected {reason or 'equal'}")
            if reason and not same:
                reasons.append(f"{version}: {reason}")
            reasons += _other_metrics(means, found["metrics"], version)
        lines.append(f"| {name} | {loss:.6f} | {' | '.join(cells)} | {'; '.join(reasons)} |")
    return lines, problems


def _reason(case: Case, version: str) -> str | None:
    return next((reason for begin, reason in case.differs.items() if version.startswith(begin)), None)


def _other_metrics(ours: Mapping[str, float], theirs: Mapping[str, float], version: str) -> list[str]:
    """The metrics that both have and that differ: all names, and the values of the first."""
    differ = [name for name in _METRICS if name in ours and name in theirs and not _close(ours[name], theirs[name])]
    if not differ:
        return []
    first = differ[0]
    return [f"{version}: {', '.join(differ)} ({first} {theirs[first]:.4f}, mpar {ours[first]:.4f})"]


def _close(one: float, other: float) -> bool:
    return math.isfinite(other) and abs(one - other) <= _CLOSE * max(1.0, abs(one), abs(other))


if __name__ == "__main__":
    sys.exit(main())
