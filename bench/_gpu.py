"""What is noted besides with a number that was measured on a GPU: the chip, its driver, its clocks."""

import subprocess
from dataclasses import replace

import torch
import triton

from bench._machine import ROOT, this_run
from bench._result import Origin

__all__ = ["describe", "this_gpu_run"]

SHOWN = ("date", "commit", "gpu", "driver", "clocks", "torch", "triton", "cuda", "python", "copy", "product", "command")


def this_gpu_run(commit: str) -> Origin:
    """`this_run`, and facts of this machine's GPU. `commit`: the commit, for where there is no git; "": read it from COMMIT."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        name, driver, *clocks = (field.strip() for field in answer.split(","))
    except (OSError, subprocess.CalledProcessError, IndexError):
        name, driver, clocks = torch.cuda.get_device_name(), "unknown", []
    known = this_run()
    file = ROOT / "COMMIT"
    if commit or (str(known.commit).startswith("unknown") and file.exists()):
        known = replace(known, commit=commit or file.read_text(encoding="utf-8").strip())
    return replace(
        known,
        gpu=name,
        driver=driver,
        clocks="sm {}, at most {}, memory {}, power limit {}".format(*clocks) if len(clocks) == 4 else "unknown",
        triton=triton.__version__,
        cuda=torch.version.cuda,
    )


def describe(origin: Origin) -> str:
    """The facts that `origin` states, in one sentence."""
    stated = origin.stated()
    return ", ".join(f"{key} {stated[key]}" for key in SHOWN if key in stated)
