"""What a number from a GPU needs besides: the chip, its driver, its clocks."""

import subprocess
from collections.abc import Mapping
from typing import Any

import torch
import triton

from bench._machine import ROOT, machine

__all__ = ["describe_facts", "gpu_facts"]


def gpu_facts(commit: str) -> dict[str, Any]:
    """Facts about this run. `commit`: what is measured, where there is no git; "": as the file COMMIT says."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        name, driver, *clocks = (field.strip() for field in answer.split(","))
    except (OSError, subprocess.CalledProcessError, IndexError):
        name, driver, clocks = torch.cuda.get_device_name(), "unknown", []
    known = machine()
    file = ROOT / "COMMIT"
    if commit or (known["commit"].startswith("unknown") and file.exists()):
        known["commit"] = commit or file.read_text(encoding="utf-8").strip()
    return known | {
        "gpu": name,
        "driver": driver,
        "clocks": "sm {}, at most {}, memory {}, power limit {}".format(*clocks) if len(clocks) == 4 else "unknown",
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def describe_facts(line: Mapping[str, Any]) -> str:
    """Those facts of a line of results, in one sentence."""
    keys = ("date", "commit", "gpu", "driver", "clocks", "torch", "triton", "cuda", "python", "copy", "product", "command")
    return ", ".join(f"{key} {line[key]}" for key in keys if key in line)
