"""Metrics: what the worker counts, in the text format of Prometheus."""

import json
from collections.abc import Iterable

from mpar.serve._worker import Worker

__all__ = ["metrics_text"]


def metrics_text(worker: Worker, model: str) -> str:
    """All counts and gauges. Those that belong to an adapter have its name as `model`, those of the base the name `model`."""
    counts = {model if adapter is None else adapter: found for adapter, found in worker.counts.items()}
    steps, scheduler = worker.steps, worker.assistant.engine.scheduler
    pools = scheduler.pools
    by_model = [
        ("prompt_tokens_total", "tokens of prompts", {name: found.prompt_tokens for name, found in counts.items()}),
        (
            "shared_tokens_total",
            "tokens of prompts that the cache had already",
            {name: found.shared_tokens for name, found in counts.items()},
        ),
        ("answer_tokens_total", "tokens of answers", {name: found.answer_tokens for name, found in counts.items()}),
    ]
    values = [
        ("steps_total", "counter", "steps of the engine", steps.steps),
        ("step_seconds_total", "counter", "time of these steps", steps.step_s),
        ("refused_total", "counter", "requests refused because too many wait", steps.refused),
        ("preempted_total", "counter", "answers that gave their pages back to others", scheduler.num_preempted),
        ("running", "gauge", "answers that have a row", worker.num_running),
        ("waiting", "gauge", "answers that wait for a row", worker.num_waiting),
        ("pages", "gauge", "pages of the cache", sum(pool.num_pages - 1 for pool in pools)),
        ("pages_free", "gauge", "pages that no answer uses", sum(pool.num_free for pool in pools)),
    ]
    lines = []
    for name, about, found in by_model:
        lines += _metric(name, "counter", about, [(_labels(model=label), value) for label, value in found.items()])
    for name, kind, about, value in values:
        lines += _metric(name, kind, about, [("", value)])
    ended = [(_labels(model=label, finish=why), n) for label, found in counts.items() for why, n in sorted(found.ended.items())]
    lines += _metric("answers_total", "counter", "answers that have ended", ended)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> list[str]:
    """The lines of a metric, of which each value has labels."""
    return [f"# HELP mpar_{name} {about}", f"# TYPE mpar_{name} {kind}", *(f"mpar_{name}{labels} {n}" for labels, n in values)]


def _labels(**values: str) -> str:
    return "{" + ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()) + "}"
