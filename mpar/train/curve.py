"""Draws pictures of runs: losses and other numbers over steps, and the load of experts over layers and steps."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mpar.train._metrics import StepRecord

__all__ = ["draw_experts", "draw_lengths", "draw_loss", "draw_losses", "draw_numbers", "draw_rewards", "draw_scores"]

_PANELS = {
    "max_load": ("max / mean load of an expert", 1.0, None),
    "entropy": ("entropy, 1 is even", 0.0, 1.0),
    "dropped": ("dropped", 0.0, None),
}

_OF_EVERY_RUN = frozenset(field.name for field in dataclasses.fields(StepRecord)) | frozenset(_PANELS)


def draw_loss(records: Sequence[Mapping[str, float]], path: Path, title: str) -> Path:
    """Write a PNG of the loss over steps, with the losses of evaluations and the learning rate. The axis of losses is logarithmic
    if all losses are positive.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [record["step"] for record in records]
    axes.plot(steps, [record["loss"] for record in records], color="tab:blue")
    names = sorted({name for record in records for name in record if name.partition("/")[0] == "eval_loss"})
    for name in [name for name in names if "/" in name] or names:
        held_out = [(record["step"], record[name]) for record in records if name in record]
        label = name.partition("/")[2] or "evaluation"
        axes.plot(*zip(*held_out, strict=True), color=None if "/" in name else "tab:green", marker="o", markersize=4, label=label)
    if names:
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


def draw_numbers(records: Sequence[Mapping[str, float]], path: Path, title: str) -> Path | None:
    """Write a PNG with a small panel for each number that a run reports beside those of every run, such as the rewards of a task,
    over steps; values of evaluations are points. None if there is no such number. `records` are lines of `metrics.jsonl`.
    """
    names = sorted({name for record in records for name in record if _is_other(name)})
    if not names:
        return None
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(3.2 * columns + 0.4, 2.2 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for name, axes in itertools.zip_longest(names, panels):
        if name is None:
            axes.set_axis_off()
            continue
        for key, style in ((name, "-"), (f"eval_{name}", "o")):
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=4, color="tab:green" if style == "o" else "tab:blue")
        axes.set_title(name, fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(True, alpha=0.3)
    figure.supxlabel("step; points: on the data to evaluate on", fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _is_other(name: str) -> bool:
    """Whether a number of a record is not one that every run has, nor of data, evaluation or experts."""
    return name not in _OF_EVERY_RUN and not name.startswith(("eval_", "rows/", "tokens/", *(f"{panel}/" for panel in _PANELS)))


def draw_rewards(
    rows: Sequence[Mapping[str, float]], path: Path, title: str, held_out: Sequence[Mapping[str, float]] = ()
) -> Path:
    """Write a picture of the mean reward over updates, with each of several rewards, and of the mean length of answers. `rows`
    have `step`, `reward` and `answer_tokens`; so have those of held-out prompts, whose rewards are points."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in rows if "reward" in row]
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["reward"] for row in rows], color="tab:blue", label="reward")
    names = sorted({name for row in rows for name in row if name.startswith("reward/")})
    for name in names if len(names) > 1 else []:
        axes.plot(steps, [row.get(name, float("nan")) for row in rows], linewidth=1, label=name.partition("/")[2])
    points = [(row["step"], row["reward"]) for row in held_out if "reward" in row]
    if points:
        axes.plot(*zip(*points, strict=True), "o", markersize=4, color="tab:green", label="held-out prompts")
    if len(names) > 1 or points:
        axes.legend(loc="lower right", fontsize="small")
    axes.set(xlabel="update", ylabel="mean reward of an answer", title=title)
    axes.grid(True, alpha=0.3)
    lengths = axes.twinx()
    lengths.plot(steps, [row["answer_tokens"] for row in rows], color="tab:orange", alpha=0.6, linewidth=1)
    lengths.set_ylabel("mean tokens of an answer", color="tab:orange")
    figure.savefig(path, dpi=120)
    return path


def draw_lengths(lengths: Sequence[int], seq_len: int, path: Path) -> Path:
    """Write a picture of how many documents have which length in positions, and where a sequence ends, on logarithmic axes."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max(2, *lengths, seq_len)
    edges = sorted({round(longest ** (i / 40)) for i in range(41)} | {longest + 1})
    axes.hist(lengths, bins=edges, color="tab:blue")
    axes.axvline(seq_len, color="tab:orange", label=f"seq_len={seq_len}")
    axes.set(xlabel="positions of a document", ylabel="documents", xscale="log", yscale="log")
    axes.legend()
    axes.grid(True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def draw_losses(records_by_label: Mapping[str, Sequence[Mapping[str, float]]], path: Path, title: str) -> Path | None:
    """Write a PNG with one curve for the losses of each run, those of evaluations as points. None if there are no records."""
    if not records_by_label:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, records in records_by_label.items():
        (line,) = axes.plot([record["step"] for record in records], [record["loss"] for record in records], label=label)
        held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), color=line.get_color(), marker="o", markersize=4, linestyle="none")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    if all(record["loss"] > 0 for records in records_by_label.values() for record in records):
        axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path


def draw_experts(records: Sequence[Mapping[str, float]], path: Path, title: str) -> Path | None:
    """Write a PNG with a row for each layer of experts and a column for each step: panels with the load of the busiest expert,
    the entropy of all experts, and the share of dropped slots if any were dropped. None if the records have no experts."""
    layers = [name.removeprefix("max_load/") for name in records[-1] if name.startswith("max_load/")]
    records = [record for record in records if all(f"max_load/{layer}" in record for layer in layers)]
    if not layers:
        return None
    panels = [name for name in _PANELS if name != "dropped" or any(record["dropped"] for record in records)]
    figure = Figure(figsize=(7, (1.2 + 0.16 * len(layers)) * len(panels) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    steps = [record["step"] for record in records]
    for name, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        label, low, high = _PANELS[name]
        values = [[record[f"{name}/{layer}"] for record in records] for layer in layers]
        extent = (steps[0] - 0.5, steps[-1] + 0.5, len(layers) - 0.5, -0.5)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", extent=extent, vmin=low, vmax=high, cmap="viridis")
        axes.set_yticks(range(len(layers)), layers, fontsize=6)
        axes.set(title=label, xlabel="step")
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
    return path


def draw_scores(results: Mapping[str, Mapping], path: Path) -> Path:
    """Write a picture of the results of models: their losses by set, and the shares of right answers by task and measure.
    Measures of tasks that are no shares, such as perplexities, are not in it.
    """
    losses = {(name, "loss") for found in results.values() for name in found["sets"]}
    measured = [
        (name, *item) for found in results.values() for name, measures in found["tasks"].items() for item in measures.items()
    ]
    scores = {(name, measure) for name, measure, values in measured if 0 <= values["value"] <= 1}
    panels = [(sorted(labels), title) for labels, title in ((losses, "loss (nats per token)"), (scores, "right")) if labels]
    figure = Figure(figsize=(7, 1 + 0.5 * sum(len(labels) for labels, _ in panels) * max(1, len(results))), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (labels, title) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number)
        height = 0.8 / len(results)
        for index, (model, found) in enumerate(results.items()):
            entries = [_entry(found, *label) for label in labels]
            places = [place + height * (index - (len(results) - 1) / 2) for place in range(len(labels))]
            axes.barh(places, [value for value, _ in entries], height, xerr=[error for _, error in entries], label=model)
        names = [f"{Path(name).name}\n{measure}" for name, measure in labels]
        axes.set(xlabel=title, yticks=range(len(labels)), yticklabels=names)
        axes.invert_yaxis()
        axes.grid(True, axis="x", alpha=0.3)
        if len(results) > 1:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _entry(found: Mapping, name: str, measure: str) -> tuple[float, float]:
    """A result and its standard error; not a number if the model has no such result."""
    if measure == "loss":
        return found["sets"].get(name, {}).get("loss", float("nan")), 0.0
    values = found["tasks"].get(name, {}).get(measure, {})
    return values.get("value", float("nan")), values.get("error") or 0.0
