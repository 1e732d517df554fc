"""Metrics: what the worker counts, in the text format of Prometheus."""

from mpar.serve._worker import Worker

__all__ = ["metrics_text"]


def metrics_text(worker: Worker) -> str:
    """All counts and gauges."""
    counts, scheduler = worker.counts, worker.assistant.engine.scheduler
    pools = scheduler.pools
    values = [
        ("prompt_tokens_total", "counter", "tokens of prompts", counts.prompt_tokens),
        ("shared_tokens_total", "counter", "tokens of prompts that the cache had already", counts.shared_tokens),
        ("answer_tokens_total", "counter", "tokens of answers", counts.answer_tokens),
        ("steps_total", "counter", "steps of the engine", counts.steps),
        ("step_seconds_total", "counter", "time of these steps", counts.step_s),
        ("refused_total", "counter", "requests refused because too many wait", counts.refused),
        ("preempted_total", "counter", "answers that gave their pages back to others", scheduler.num_preempted),
        ("running", "gauge", "answers that have a row", worker.num_running),
        ("waiting", "gauge", "answers that wait for a row", worker.num_waiting),
        ("pages", "gauge", "pages of the cache", sum(pool.num_pages - 1 for pool in pools)),
        ("pages_free", "gauge", "pages that no answer uses", sum(pool.num_free for pool in pools)),
    ]
    lines = []
    for name, kind, about, value in values:
        lines += [f"# HELP mpar_{name} {about}", f"# TYPE mpar_{name} {kind}", f"mpar_{name} {value}"]
    lines += ["# HELP mpar_answers_total answers that have ended", "# TYPE mpar_answers_total counter"]
    lines += [f'mpar_answers_total{{finish="{why}"}} {count}' for why, count in sorted(counts.ended.items())]
    return "\n".join(lines) + "\n"
