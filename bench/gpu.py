"""`python -m bench.gpu --out FOLDER`: everything worth running on one GPU, unattended, in ten minutes.

Numerics first: every entry of the table of kernels against float64 and against itself, by `pytest -m gpu` where pytest is
installed, which also runs programs, and by a plain loop where it is not. Then the table of kernels beside peers, then training
steps beside peers. A part that fails or runs out of time costs the others nothing. Each leaves its files in the folder, and its
output as <part>.txt.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from bench._machine import ROOT
from bench.kernels._case import all_cases, calling
from mpar.kernels import kernels_for
from tests.kernels.checked import checked, make_on

SHARES = {"numerics": 0.3, "kernels": 0.6, "step": 1.0}
"""What a part may take of the time that is then left, in order."""


def main() -> int:
    """Run all parts; 1 if one of them reported a failure."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all parts together")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--parts", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--plain", action="store_true", help="only the plain loop over the table, in this process")
    args = parser.parse_args()
    if args.plain:
        return check_table(sys.stdout)
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.perf_counter() + args.seconds
    failed = [part for part in args.parts if not _run(part, args.out, args.commit, SHARES[part] * (ends - time.perf_counter()))]
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "all parts passed\n")
    return 1 if failed else 0


def _run(part: str, out: Path, commit: str, seconds: float) -> bool:
    """Whether the part ended well, within its time."""
    command, began = _command(part, out, commit, seconds), time.perf_counter()
    log = out / f"{part}.txt"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds + 15).returncode
        except subprocess.TimeoutExpired:
            code = -1
            file.write(f"\nstopped after {seconds:.0f} s\n")
    verdict = "passed" if code == 0 else "out of time" if code == -1 else f"exit code {code}"
    sys.stdout.write(f"{part}: {verdict} in {time.perf_counter() - began:.0f} s, see {log}\n")
    sys.stdout.flush()
    return code == 0


def _command(part: str, out: Path, commit: str, seconds: float) -> list[str]:
    python = [sys.executable, "-m"]
    if part == "numerics":
        if importlib.util.find_spec("pytest") is None:
            return [*python, "bench.gpu", "--plain", "--out", str(out)]
        return [*python, "pytest", "-m", "gpu", "-q", "--maxfail=20", "tests/program/test_gpu.py", "tests/kernels"]
    given = ["--seconds", f"{seconds:.0f}", "--out", str(out), *(["--commit", commit] if commit else [])]
    return [*python, f"bench.{part}", "run", *given]


def check_table(out: TextIO, device: str = "cuda") -> int:
    """Every case of the table for the chip that is here; the number that are wrong."""
    arch, wrong = kernels_for("auto", device).arch, 0
    cases = [case for case in all_cases() if not case.archs or arch in case.archs]
    for case in cases:
        try:
            with calling(checked):
                case.run(make_on(device))
            out.write(f"right  {case.name}\n")
        except Exception:  # whatever it is, the other cases are checked
            wrong += 1
            out.write(f"WRONG  {case.name}\n{traceback.format_exc()}\n")
        out.flush()
    out.write(f"{len(cases) - wrong} of {len(cases)} cases are right\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
