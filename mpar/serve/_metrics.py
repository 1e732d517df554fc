"""Metrics: what the worker counts and measures, in the text format of Prometheus."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mpar.serve._worker import Counts, Worker

__all__ = ["metrics_text"]


def metrics_text(worker: Worker, model: str) -> str:
    """All counts, gauges and histograms. Those that belong to an adapter have its name as `model`, those of the base `model`."""
    return generate_latest(_Collector(worker, model)).decode()  # type: ignore[arg-type]  # all that it needs is `collect`


@dataclass(frozen=True)
class _Collector:
    worker: Worker
    model: str

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        worker = self.worker
        steps, scheduler = worker.steps, worker.assistant.engine.scheduler
        pools = scheduler.pools
        yield from self._by_model()
        yield _counter("steps", "steps of the engine", steps.steps)
        yield _counter("step_seconds", "time of these steps", steps.step_s)
        yield _counter("refused", "requests refused because too many wait", steps.refused)
        yield _counter("preempted", "answers that gave their pages back to others", scheduler.num_preempted)
        yield _gauge("running", "answers that have a row", worker.num_running)
        yield _gauge("waiting", "answers that wait for a row", worker.num_waiting)
        yield _gauge("pages", "pages of the cache", sum(pool.num_pages - 1 for pool in pools))
        yield _gauge("pages_free", "pages that no answer uses", sum(pool.num_free for pool in pools))
        for histogram in steps.latencies.histograms:
            yield from histogram.collect()

    def _by_model(self) -> Iterator[Metric]:
        counts = {self.model if adapter is None else adapter: found for adapter, found in self.worker.counts.items()}
        for name, about, value in (
            ("prompt_tokens", "tokens of prompts", lambda found: found.prompt_tokens),
            ("shared_tokens", "tokens of prompts that the cache had already", lambda found: found.shared_tokens),
            ("answer_tokens", "tokens of answers", lambda found: found.answer_tokens),
        ):
            metric = CounterMetricFamily(f"mpar_{name}", about, labels=["model"])
            for label, found in counts.items():
                metric.add_metric([label], value(found))
            yield metric
        yield _ended(counts.items())


def _ended(counts: Iterable[tuple[str, Counts]]) -> Metric:
    metric = CounterMetricFamily("mpar_answers", "answers that have ended", labels=["model", "finish"])
    for label, found in counts:
        for why, number in sorted(found.ended.items()):
            metric.add_metric([label, why], number)
    return metric


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"mpar_{name}", about, value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mpar_{name}", about, value)
