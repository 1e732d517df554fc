"""`python -m bench.gpu --out FOLDER`: everything worth running on one GPU, unattended, in ten minutes.

Numerics come first: every entry of the table of kernels is checked against float64 and against itself. Where pytest is installed,
`pytest -m gpu` does this and also runs programs; otherwise `tools.kernel_gate check` does it. Then kernels are timed beside their
peers, and training steps beside theirs. If a part fails or runs out of time, the others still run. A part that is out of time is
interrupted, so that it can print what it has found. Each part writes its files into the folder, and its output, as it comes, to
<part>.txt there.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench._machine import ROOT

SHARES = {"numerics": 0.45, "kernels": 0.55, "step": 0.85, "gluon": 1.0}
"""The parts in order, and the share of the remaining time that each may take. Gluon is last: its kernels can hang at barriers."""
PYTEST = ("pytest", "-m", "gpu", "-vv", "--tb=short", "--maxfail=20")
"""With these options every test has a line, which is written at once."""
GRACE_S, GOODBYE_S = 10.0, 10.0
"""Seconds that a part may take beyond its time before it is interrupted, and then to print what it found before it is killed."""


def main() -> int:
    """Run all parts. Returns 1 if one of them failed or ran out of time."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--seconds", type=float, default=570.0, help="time for all parts together")
    parser.add_argument("--commit", default="", help="the commit that is measured, for where there is no git")
    parser.add_argument("--parts", nargs="+", default=list(SHARES), choices=list(SHARES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with it ignored, also for parts
    ends = time.perf_counter() + args.seconds
    failed = [part for part in args.parts if not _run(part, args.out, args.commit, SHARES[part] * (ends - time.perf_counter()))]
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "all parts passed\n")
    return 1 if failed else 0


def _run(part: str, out: Path, commit: str, seconds: float) -> bool:
    """Run a part. Returns whether it passed within its time."""
    command, began = _command(part, out, commit, seconds), time.perf_counter()
    log = out / f"{part}.txt"
    with log.open("w", encoding="utf-8") as file:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT) as child:
            code = _wait(child, seconds + GRACE_S)
        if code is None:
            file.write(f"\nstopped after {seconds:.0f} s\n")
    verdict = "passed" if code == 0 else "out of time" if code is None else f"exit code {code}"
    sys.stdout.write(f"{part}: {verdict} in {time.perf_counter() - began:.0f} s, see {log}\n")
    sys.stdout.flush()
    return code == 0


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for a part. Returns its exit code, or None if it had to be stopped."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        child.kill()
    return None


def _command(part: str, out: Path, commit: str, seconds: float) -> list[str]:
    python = [sys.executable, "-m"]
    if part == "gluon":
        files = ["tests/kernels/test_table.py", "tests/kernels/test_attention_gluon.py"]
        return [*python, *PYTEST, "-k", "gluon", *files]
    if part == "numerics":
        if importlib.util.find_spec("pytest") is None:
            return [*python, "tools.kernel_gate", "check"]
        table = "tests/kernels/test_table.py"
        others = (str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/kernels").glob("test_*.py")))
        files = ["tests/runtime/test_gpu.py", table, *(path for path in others if path != table)]  # in this order
        return [*python, *PYTEST, "-k", "not gluon", *files]
    given = ["--seconds", f"{seconds:.0f}", "--out", str(out), *(["--commit", commit] if commit else [])]
    return [*python, f"bench.{part}", "run", *given]


if __name__ == "__main__":
    sys.exit(main())
