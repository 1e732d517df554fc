"""Report: steps as Markdown, from lines of results, with the bars. Variants without a line are shown as not yet measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench._gpu import describe
from bench._result import Result, read_results
from bench.step._case import CASES, MEMORY_RATIO, SPEED_RATIO, VARIANTS, Case, Variant, main_peer

__all__ = ["PREDICTED_WITHIN", "bars", "markdown", "newest", "sentence", "write_table"]

PREDICTED_WITHIN, FIRST_LOSS_WITHIN, LOSSES_WITHIN = 0.03, 1.0, 0.02
"""Largest allowed distances: of predicted over measured peak from 1; in nats, of a first loss from that of a guess, and of our
first loss from the peer's."""
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
Newest = Mapping[tuple[str, str], Result]
"""The result that counts for each case and variant."""


def write_table(out: Path) -> None:
    """`step.md` from `step.jsonl` in the folder `out`."""
    text = markdown(read_results(out / "step.jsonl"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.md").write_text(text, encoding="utf-8")


def newest(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    """For each case and variant the last line; but a line that was not reached does not replace one that was measured."""
    found: dict[tuple[str, str], Result] = {}
    for result in results:
        key = result.text("case"), result.text("variant")
        if result.text("status") != "not reached" or found.get(key, result).text("status") != "ok":
            found[key] = result
    return found


def markdown(results: Sequence[Result]) -> str:
    """Facts of the runs, the table of all cases and variants, bars, what did not run, and how each variant was set up."""
    last = newest(results)
    runs = list(dict.fromkeys(result.origin.run for result in last.values()))
    text = ["# A training step on one GPU", "", "Made by `python -m bench.step run`; all runs are in `step.jsonl`.", ""]
    for number, run in enumerate(runs, 1):
        origin = next(result.origin for result in last.values() if result.origin.run == run)
        text.append(f"- run {number}, {run} UTC: {describe(origin)}")
    text += [] if runs else ["Nothing here has been measured on a GPU yet."]
    text += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for case in CASES:
        text += [f"| {' | '.join(_cells(case, variant, last, runs))} |" for variant in VARIANTS]
    text += ["", *EXPLANATION, "", "| case | bar | ours | |", "|---|---|---|---|"]
    for case in CASES:
        text += [f"| {case.key} | {bar} | {figure} | {_bold(verdict)} |" for bar, figure, verdict in bars(case, last)]
    about, problems = (
        [f"- {key} {name}: {result.text(words)}" for (key, name), result in last.items() if result.has(words)]
        for words in ("about", "cut")
    )
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


def bars(case: Case, results: Newest) -> list[tuple[str, str, str]]:
    """For a case its bars: (what must hold, the figure, "met", "missed" or "not measured")."""
    timed = {name: result for (key, name), result in results.items() if key == case.key and result.text("status") == "ok"}
    ours, peer = _fastest([v.name for v in VARIANTS if v.ours], timed), _fastest(main_peer(list(timed)), timed)
    own, other = (None if name is None else timed[name] for name in (ours, peer))
    found = []
    if case.tokens_per_s is not None:
        least, rate = case.tokens_per_s, None if own is None else own.number("tokens_per_s")
        figure = "" if rate is None else f"{rate:,.0f} ({ours})"
        found.append((f">= {least:,.0f} tokens/s", figure, _verdict(rate, lambda rate: rate >= least)))
    same_run = own is None or other is None or own.origin.run == other.origin.run
    names = f" ({ours} over {peer}{'' if same_run else ', of another run'})"
    speed, memory = (_ratio(own, other, key, key) for key in ("tokens_per_s", "peak_bytes"))
    predicted = _ratio(own, own, "predicted_bytes", "peak_bytes")
    apart = None if own is None or other is None else abs(_first_loss(own) - _first_loss(other))
    guess = math.log(case.config()["vocab_size"])
    far = max((abs(_first_loss(result) - guess) for result in timed.values()), default=None)
    rows: tuple[tuple[str, float | None, Callable[[float], bool], str], ...] = (
        (f">= {SPEED_RATIO:.2f}x tokens/s of the peer", speed, lambda x: x >= SPEED_RATIO, "{:.3f}" + names),
        (f"<= {MEMORY_RATIO:.2f}x memory of the peer", memory, lambda x: x <= MEMORY_RATIO, "{:.3f}" + names),
        (f"peak predicted within {PREDICTED_WITHIN:.0%}", predicted, lambda x: abs(x - 1) <= PREDICTED_WITHIN, "{:.3f}"),
        (f"first losses within {LOSSES_WITHIN} of each other", apart, lambda x: x <= LOSSES_WITHIN, "{:.4f}" + names),
        (f"first losses within {FIRST_LOSS_WITHIN} of {guess:.2f}", far, lambda x: x <= FIRST_LOSS_WITHIN, "{:.2f} at the most"),
    )
    return found + [(text, "" if x is None else form.format(x), _verdict(x, holds)) for text, x, holds, form in rows]


def sentence(result: Result) -> str:
    """One line for the screen."""
    name = f"{result.text('case')} {result.text('variant')}"
    if result.text("status") != "ok":
        return f"{name}: {result.text('status').upper()}: {result.figures.get('error', '')}"
    parts = [f"{result.number('ms'):.4g} ms", f"{result.number('tokens_per_s'):,.0f} tokens/s", f"MFU {result.number('mfu'):.1%}"]
    for word, key in (("peak", "peak_bytes"), ("predicted", "predicted_bytes")):
        parts += [f"{word} {result.number(key) / GIGA:.2f} GB"] if result.has(key) else []
    return f"{name}: {', '.join(parts)}, built in {result.number('built_s'):.0f} s, losses {_losses(result)}"


def _cells(case: Case, variant: Variant, results: Newest, runs: Sequence[str | None]) -> list[str]:
    result, first = results.get((case.key, variant.name)), [case.key, variant.name]
    if result is None:
        return [*first, "not yet measured", *[""] * 8]
    run, value = str(1 + runs.index(result.origin.run)), result.number
    if result.text("status") != "ok":
        words = f"{result.text('status')}: {result.figures.get('error', '')}".replace("|", "/")
        return [*first, words, *[""] * 7, run]
    ratio = _ratio(result, result, "predicted_bytes", "peak_bytes")
    predicted = f"{value('predicted_bytes') / GIGA:.2f}" if result.has("predicted_bytes") else ""
    return [
        *first,
        f"{value('ms'):.1f} ({value('q20'):.1f} to {value('q80'):.1f})",
        ", ".join(f"{ms:.1f}" for ms in result.numbers("rounds")) + f"; wall {value('wall_ms'):.1f}",
        f"{value('tokens_per_s'):,.0f}",
        f"{value('flops_per_s') / TERA:.0f}, {value('flops_per_s_causal') / TERA:.0f}",
        f"{value('mfu'):.1%}, {value('mfu_causal'):.1%}",
        f"{value('peak_bytes') / GIGA:.2f}" if result.has("peak_bytes") else "",
        predicted + ("" if ratio is None else f" ({ratio:.3f})"),
        _losses(result),
        run,
    ]


def _losses(result: Result) -> str:
    losses = result.numbers("losses")
    return ", ".join(f"{loss:.4f}" for loss in (losses[0], losses[1], losses[-1], result.number("last_loss")))


def _first_loss(result: Result) -> float:
    return result.numbers("losses")[0]


def _fastest(names: Sequence[str], timed: Mapping[str, Result]) -> str | None:
    """The one of these variants whose step is shortest, among those that were timed."""
    return min((name for name in names if name in timed), key=lambda name: timed[name].number("ms"), default=None)


def _ratio(over: Result | None, under: Result | None, key: str, under_key: str) -> float | None:
    """`key` of one line divided by `under_key` of another; None unless both have it."""
    if over is None or under is None or not (over.has(key) and under.has(under_key)):
        return None
    return over.number(key) / under.number(under_key)


def _verdict(value: float | None, holds: Callable[[float], bool]) -> str:
    return "not measured" if value is None else "met" if holds(value) else "missed"


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "missed" else verdict
