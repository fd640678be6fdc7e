"""Metrics for Prometheus at `/metrics`: requests as they are answered, and the sampler's counts at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from rolljax.sampler.client import SamplerClient
    from rolljax.types import Completion

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, sampler: SamplerClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SamplerCollector(sampler))
        self.requests = Counter(
            "rolljax_http_requests", "HTTP requests", ["endpoint", "status"], registry=self._registry
        )
        self.open = Gauge("rolljax_http_open_requests", "Requests for tokens being answered", registry=self._registry)
        self.seconds = self._histogram("rolljax_request_seconds", "From a request to the end of its answer", REQUEST_S)
        self.first_token = self._histogram(
            "rolljax_time_to_first_token_seconds", "From a request to an answer's first token", FIRST_TOKEN_S
        )
        self.between_tokens = self._histogram(
            "rolljax_inter_token_seconds", "Between two tokens, mean over an answer", BETWEEN_TOKENS_S
        )

    def answered(self, before_s: float, completion: Completion) -> None:
        """Count one answer; `before_s`: seconds the request took before it reached the sampler."""
        tokens = len(completion.tokens)
        if tokens:
            self.first_token.observe(before_s + completion.queue_s)
        if tokens > 1:
            self.between_tokens.observe(completion.sample_s / (tokens - 1))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, meaning, buckets=buckets, registry=self._registry)


class _SamplerCollector(Collector):
    def __init__(self, sampler: SamplerClient) -> None:
        self._sampler = sampler

    def collect(self) -> Iterator[Metric]:
        stats, load = self._sampler.stats, self._sampler.load()
        hits = stats.reused_tok / max(stats.reused_tok + stats.prefill_tok, 1)
        yield _count("answers", "Answers asked of the sampler", stats.requests)
        yield _count("aborted_answers", "Answers given up: the client left, or the server stopped", stats.aborted)
        yield _count("preemptions", "Answers set back to make room for others", stats.preemptions)
        yield _count("prompt_tokens", "Tokens of all prompts", stats.prompt_tok)
        yield _count("prefill_tokens", "Prompt tokens computed", stats.prefill_tok)
        yield _count("reused_tokens", "Prompt tokens not computed: cached, or a sibling's", stats.reused_tok)
        yield _count("sampled_tokens", "Tokens sampled", stats.sampled_tok)
        yield _count("drafted_tokens", "Tokens guessed ahead", stats.drafted_tok)
        yield _count("accepted_tokens", "Guessed tokens that were sampled", stats.accepted_tok)
        yield _count("dispatches", "Decode programs run", stats.dispatches)
        yield _gauge("waiting", "Answers waiting for a slot", load.waiting)
        yield _gauge("running", "Answers in slots", load.running)
        yield _gauge("slots", "Slots", load.slots)
        yield _gauge("prefix_hit_ratio", "Share of prompt tokens that were not computed", hits)
        yield _gauge("policy_version", "Version of the weights in use", self._sampler.version)
        pages = GaugeMetricFamily("rolljax_kv_pages", "Pages of keys and values", labels=["state"])
        pages.add_metric(["all"], load.pages)
        pages.add_metric(["used"], load.used_pages)
        pages.add_metric(["cached"], load.cached_pages)
        pages.add_metric(["shared"], load.shared_pages)
        yield pages


def _count(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"rolljax_{name}", meaning, value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rolljax_{name}", meaning, value)
