"""Latencies: how long clients wait for the first token, from token to token, and for the answer, as histograms."""

from prometheus_client import Histogram, disable_created_metrics

__all__ = ["Latencies"]

disable_created_metrics()  # the library would add a gauge to each histogram, of when it was made

_BOUNDS_S = tuple(0.001 * 2**power for power in range(19))
"""From a millisecond to four minutes."""


class Latencies:
    """What has been measured since the start, for /metrics; the names are those of other servers."""

    def __init__(self) -> None:
        self.first_token_s = _histogram("time_to_first_token_seconds", "from the request to the first token of an answer")
        self.next_token_s = _histogram("inter_token_latency_seconds", "from a token of an answer to the next one")
        self.answer_s = _histogram("e2e_request_latency_seconds", "from the request to the end of an answer")

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """All of them."""
        return self.first_token_s, self.next_token_s, self.answer_s


def _histogram(name: str, about: str) -> Histogram:
    return Histogram(f"mpar_{name}", about, buckets=_BOUNDS_S, registry=None)
