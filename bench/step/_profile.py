"""Profile: one step as a trace for chrome://tracing or Perfetto, and its kernels by time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["profile_step"]

TOP = 30
LONGEST_NAME = 90


def profile_step(step: Callable[[], Any], folder: Path, name: str, *, trace: bool, cuda: bool) -> str:
    """A Markdown table of the kernels (on a CPU: ops) of `step()` that take longest. With `trace`, `step_<name>.json.gz` too."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started)
    if trace:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"step_{name}.json.gz"))
    averages = profiler.key_averages()
    if cuda:
        found = [(a.key, a.count, a.self_device_time_total / 1e3) for a in averages if a.device_type == DeviceType.CUDA]
    else:
        found = [(a.key, a.count, a.self_cpu_time_total / 1e3) for a in averages]
    return _table(name, wall_ms, found)


def _table(name: str, wall_ms: float, found: list[tuple[str, int, float]]) -> str:
    busy = sum(ms for _, _, ms in found)
    lines = [
        f"## {name}",
        "",
        f"{sum(count for _, count, _ in found)} calls, {busy:.1f} ms of {wall_ms:.1f} ms with the profiler.",
    ]
    lines += ["", "| kernel | calls | ms | of all |", "|---|---|---|---|"]
    for key, count, ms in sorted(found, key=lambda row: -row[2])[:TOP]:
        shown = key.replace("|", "/")[:LONGEST_NAME]
        lines.append(f"| `{shown}` | {count} | {ms:.2f} | {100 * ms / max(busy, 1e-9):.1f} % |")
    return "\n".join(lines) + "\n"
