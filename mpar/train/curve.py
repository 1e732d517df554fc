"""The picture of a run: its loss over steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw_loss"]


def draw_loss(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Write a PNG of loss over steps on a logarithmic axis, the loss of evaluations on it, and the learning rate beside it."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [record["step"] for record in records]
    axes.plot(steps, [record["loss"] for record in records], color="tab:blue")
    held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="tab:green", marker="o", markersize=4, label="evaluation")
        axes.legend(loc="upper center")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    if all(record["loss"] > 0 for record in records):
        axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.3)
    rates = axes.twinx()
    rates.plot(steps, [record["lr"] for record in records], color="tab:orange", alpha=0.6, linewidth=1)
    rates.set_ylabel("learning rate", color="tab:orange")
    figure.savefig(path, dpi=120)
    return path
