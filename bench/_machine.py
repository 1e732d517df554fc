"""The machine: what must be known to reproduce a number that is measured on it, and how busy other processes keep it."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from bench._result import Origin

__all__ = ["ROOT", "foreign_cpu_s", "this_run"]

ROOT = Path(__file__).resolve().parents[1]


def this_run() -> Origin:
    """Hardware, versions, commit, date and command of this process."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.processor())
    return Origin(
        date=datetime.date.today().isoformat(),
        commit=_git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "mpar") else ""),
        cpu=f"{os.cpu_count()} cores, {model}",
        torch=torch.__version__,
        python=platform.python_version(),
        command="python -m " + " ".join([_module(), *sys.argv[1:]]),
    )


def foreign_cpu_s() -> float:
    """CPU seconds that all processes of the machine have used since it started. Callers take differences of it."""
    with open("/proc/stat") as file:
        fields = [int(x) for x in file.readline().split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _module() -> str:
    path = Path(sys.argv[0]).resolve()
    parts = path.relative_to(ROOT).with_suffix("").parts if path.is_relative_to(ROOT) else (path.stem,)
    return ".".join(part for part in parts if part != "__main__")
