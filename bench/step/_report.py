"""Report: steps as Markdown, from lines of results, and what they must reach; what no line is about is not yet measured."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._gpu import describe_facts
from bench.step._case import CASES, MEMORY_RATIO, SPEED_RATIO, VARIANTS, Case, Variant, main_peer

__all__ = ["PREDICTED_WITHIN", "bars", "markdown", "newest", "sentence", "write_table"]

PREDICTED_WITHIN, FIRST_LOSS_WITHIN, LOSSES_WITHIN = 0.03, 1.0, 0.02
"""Predicted over measured peak, from 1. In nats: a first loss, from that of a guess; first losses of ours and the peer."""
GIGA, TERA = 1e9, 1e12
COLUMNS = (
    "case",
    "variant",
    "ms (20 to 80 %)",
    "ms by rounds",
    "tokens/s",
    "TFLOP/s all pairs, causal",
    "MFU all pairs, causal",
    "peak GB",
    "predicted GB",
    "losses of steps 1, 2, 7, and last",
    "run",
)
Lines = Mapping[tuple[str, str], Mapping[str, Any]]


def write_table(out: Path) -> None:
    """`step.md` from `step.jsonl` in the folder `out`."""
    path = out / "step.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.md").write_text(markdown(lines), encoding="utf-8")


def newest(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """By case and variant the last line, but one that was not reached does not displace one that was measured."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for line in lines:
        key = line["case"], line["variant"]
        if line["status"] != "not reached" or found.get(key, line)["status"] != "ok":
            found[key] = line
    return found


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Facts, the table of all cases and variants, bars, what did not run, how each was set up."""
    last = newest(lines)
    runs = list(dict.fromkeys(line["run"] for line in last.values()))
    text = ["# A training step on one GPU", "", "Made by `python -m bench.step run`; all runs are in `step.jsonl`.", ""]
    for number, run in enumerate(runs, 1):
        line = next(line for line in last.values() if line["run"] == run)
        text.append(f"- run {number}, {run} UTC: {describe_facts(line)}")
    text += [] if runs else ["Nothing here has been measured on a GPU yet."]
    text += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for case in CASES:
        text += [f"| {' | '.join(_cells(case, variant, last, runs))} |" for variant in VARIANTS]
    text += ["", *EXPLANATION, "", "| case | bar | ours | |", "|---|---|---|---|"]
    for case in CASES:
        text += [f"| {case.key} | {bar} | {figure} | {_bold(verdict)} |" for bar, figure, verdict in bars(case, last)]
    about = [f"- {key} {name}: {line['about']}" for (key, name), line in last.items() if "about" in line]
    problems = [f"- {key} {name}: {line['cut']}" for (key, name), line in last.items() if "cut" in line]
    text += ["", "How they were set up:", "", *about] if about else []
    text += ["", "What was cut short:", "", *problems] if problems else []
    return "\n".join(text) + "\n"


EXPLANATION = (
    "One step: forward, backward, clipping, AdamW; masters are float32 unless it says bf16. Times are from a step's start to the",
    "next's, medians of rounds that the variants took in turn. MFU is of 989 TFLOP/s. FLOPs are those of the model's",
    "matrices and of attention, over all pairs of tokens or over the half that a causal mask leaves. The peak is the",
    "allocator's; predicted is what the program says before it runs, with what ops need while they run. Weights and tokens are",
    "the same for all. There is one GPU: nothing is communicated, as it is where others report speeds of a data-parallel job.",
    "",
    "Bars are about our fastest variant, and the fastest of transformers with float32 masters:",
)


def bars(case: Case, lines: Lines) -> list[tuple[str, str, str]]:
    """(what must hold, what we have, met | missed | not measured) for a case."""
    timed = {name: line for (key, name), line in lines.items() if key == case.key and line["status"] == "ok"}
    ours = min((v.name for v in VARIANTS if v.ours and v.name in timed), key=lambda name: timed[name]["ms"], default=None)
    peer = min(main_peer(list(timed)), key=lambda name: timed[name]["ms"], default=None)
    own, other = timed.get(ours or "", {}), timed.get(peer or "", {})
    found = []
    if case.tokens_per_s is not None:
        rate = own.get("tokens_per_s")
        figure = "" if rate is None else f"{rate:,.0f} ({ours})"
        found.append((f">= {case.tokens_per_s:,.0f} tokens/s", figure, _verdict(rate, lambda rate: rate >= case.tokens_per_s)))
    names = f" ({ours} over {peer}{'' if own.get('run') == other.get('run') else ', of another run'})"
    speed, memory = _ratio(own, other, "tokens_per_s"), _ratio(own, other, "peak_bytes")
    predicted = own["predicted_bytes"] / own["peak_bytes"] if {"predicted_bytes", "peak_bytes"} <= own.keys() else None
    apart = abs(own["losses"][0] - other["losses"][0]) if own and other else None
    guess = math.log(case.config()["vocab_size"])
    far = max((abs(line["losses"][0] - guess) for line in timed.values()), default=None)
    rows = (
        (f">= {SPEED_RATIO:.2f}x tokens/s of the peer", speed, lambda x: x >= SPEED_RATIO, "{:.3f}" + names),
        (f"<= {MEMORY_RATIO:.2f}x memory of the peer", memory, lambda x: x <= MEMORY_RATIO, "{:.3f}" + names),
        (f"peak predicted within {PREDICTED_WITHIN:.0%}", predicted, lambda x: abs(x - 1) <= PREDICTED_WITHIN, "{:.3f}"),
        (f"first losses within {LOSSES_WITHIN} of each other", apart, lambda x: x <= LOSSES_WITHIN, "{:.4f}" + names),
        (f"first losses within {FIRST_LOSS_WITHIN} of {guess:.2f}", far, lambda x: x <= FIRST_LOSS_WITHIN, "{:.2f} at the most"),
    )
    return found + [(text, "" if x is None else form.format(x), _verdict(x, holds)) for text, x, holds, form in rows]


def sentence(line: Mapping[str, Any]) -> str:
    """One line for the screen."""
    name = f"{line['case']} {line['variant']}"
    if line["status"] != "ok":
        return f"{name}: {line['status'].upper()}: {line.get('error', '')}"
    parts = [f"{line['ms']:.4g} ms", f"{line['tokens_per_s']:,.0f} tokens/s", f"MFU {line['mfu']:.1%}"]
    parts += [f"peak {line['peak_bytes'] / GIGA:.2f} GB"] if "peak_bytes" in line else []
    parts += [f"predicted {line['predicted_bytes'] / GIGA:.2f} GB"] if "predicted_bytes" in line else []
    return f"{name}: {', '.join(parts)}, built in {line['built_s']:.0f} s, losses {_losses(line)}"


def _cells(case: Case, variant: Variant, lines: Lines, runs: Sequence[str]) -> list[str]:
    line, first = lines.get((case.key, variant.name)), [case.key, variant.name]
    if line is None:
        return [*first, "not yet measured", *[""] * 8]
    run = str(1 + runs.index(line["run"]))
    if line["status"] != "ok":
        return [*first, f"{line['status']}: {line.get('error', '')}".replace("|", "/"), *[""] * 7, run]
    peak, predicted = line.get("peak_bytes"), line.get("predicted_bytes")
    return [
        *first,
        f"{line['ms']:.1f} ({line['q20']:.1f} to {line['q80']:.1f})",
        ", ".join(f"{ms:.1f}" for ms in line["rounds"]) + f"; wall {line['wall_ms']:.1f}",
        f"{line['tokens_per_s']:,.0f}",
        f"{line['flops_per_s'] / TERA:.0f}, {line['flops_per_s_causal'] / TERA:.0f}",
        f"{line['mfu']:.1%}, {line['mfu_causal']:.1%}",
        "" if peak is None else f"{peak / GIGA:.2f}",
        "" if predicted is None else f"{predicted / GIGA:.2f}" + ("" if peak is None else f" ({predicted / peak:.3f})"),
        _losses(line),
        run,
    ]


def _losses(line: Mapping[str, Any]) -> str:
    losses = line["losses"]
    return ", ".join(f"{loss:.4f}" for loss in (losses[0], losses[1], losses[-1], line["last_loss"]))


def _ratio(own: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float | None:
    return own[key] / other[key] if key in own and key in other else None


def _verdict(value: float | None, holds: Any) -> str:
    return "not measured" if value is None else "met" if holds(value) else "missed"


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "missed" else verdict
