"""Facts: what a profile says of a machine that is asked for, not measured."""

import os
import platform
from pathlib import Path

import torch

from mpar.measure._ranks import Machine

__all__ = ["facts_of"]


def facts_of(machine: Machine) -> dict[str, object]:
    """The entries of a profile that need no measurement, and under `device` what the device is called."""
    common: dict[str, object] = {"ranks_per_node": machine.ranks}
    if machine.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        arch = f"sm_{device.major}{device.minor}"
        common |= {"device": device.name, "memory_bytes": device.total_memory, "arch": arch}
        return {**common, "multiprocessors": device.multi_processor_count, "overlaps": True}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    common |= {"device": _processor(), "memory_bytes": memory // machine.ranks, "arch": None}
    return {**common, "multiprocessors": 0, "overlaps": False}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
