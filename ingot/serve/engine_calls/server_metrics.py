"""What Prometheus reads at ``/metrics``.

Covers the names (vLLM's suffixes behind ``ingot_``), the buckets and the registry.

    metrics = Metrics(); metrics.of("pocket-chat").tokens(answering, 0, news, now)
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ingot.serve.engine_calls.answering import Answering
from ingot.serve.engine_calls.process_protocol import Gauges, News

_LABEL = ("model_name",)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_FIRST_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)


class Metrics:
    """The registry of one server."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        ttft = "From a request's start to its first token."
        self.latency = Histogram(
            "ingot_e2e_request_latency_seconds", "From a request's start to its end.", _LABEL,
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self.first = Histogram(
            "ingot_time_to_first_token_seconds", ttft, _LABEL, buckets=_FIRST_SECONDS, registry=own
        )
        self.between = Histogram(
            "ingot_inter_token_latency_seconds", "Between two tokens of an answer.", _LABEL,
            buckets=_TOKEN_SECONDS, registry=own,
        )  # fmt: skip
        self.prompt_tokens = Counter("ingot_prompt_tokens", "Prompt tokens.", _LABEL, registry=own)
        self.new_tokens = Counter(
            "ingot_generation_tokens",
            "Generated tokens, also for clients that had left.",
            _LABEL,
            registry=own,
        )
        self.queries = Counter(
            "ingot_prefix_cache_queries",
            "Prompt tokens looked for in the prefix cache.",
            _LABEL,
            registry=own,
        )
        self.hits = Counter(
            "ingot_prefix_cache_hits", "Prompt tokens found in the prefix cache.", _LABEL, registry=own
        )
        self.ended = Counter(
            "ingot_request_success", "Answers that ended.", (*_LABEL, "finished_reason"), registry=own
        )
        self.recordings = Counter(
            "ingot_audio_requests", "Recordings that were transcribed.", _LABEL, registry=own
        )
        self.restarts = Counter(
            "ingot_engine_restarts", "Times that a dead engine was started again.", _LABEL, registry=own
        )
        self.audio = Counter("ingot_audio_seconds", "Their seconds of audio.", _LABEL, registry=own)
        self.running = Gauge("ingot_num_requests_running", "Requests in the batch.", _LABEL, registry=own)
        self.waiting = Gauge("ingot_num_requests_waiting", "Requests that wait.", _LABEL, registry=own)
        self.cache = Gauge(
            "ingot_kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1.", _LABEL, registry=own
        )
        self.proven = Gauge(
            "ingot_engine_proven", "1: nothing speaks against the engine's proof.", _LABEL, registry=own
        )
        self.alive = Gauge("ingot_engine_alive", "1: the engine takes requests.", _LABEL, registry=own)

    def of(self, name: str) -> EngineMetrics:
        """Those of one engine."""
        return EngineMetrics(self, name)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class EngineMetrics:
    """What one engine counts; its label is looked up once."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(name)
        self.new_tokens = metrics.new_tokens.labels(name)
        self._queries = metrics.queries.labels(name)
        self._hits = metrics.hits.labels(name)
        self._metrics = metrics
        self._name = name
        self._recordings = metrics.recordings.labels(name)
        self._audio = metrics.audio.labels(name)
        self._restarts = metrics.restarts.labels(name)
        self._latency = metrics.latency.labels(name)
        self._first = metrics.first.labels(name)
        self._between = metrics.between.labels(name)

    def tokens(self, answering: Answering, position: int, news: News, now: float) -> None:
        """Tokens of an answer have come."""
        if not news.token_ids:
            return
        before = answering.last.get((position, news.index))
        if before is not None:
            self._between.observe(now - before)
        elif not answering.last:
            self._first.observe(now - answering.started)
        answering.last[position, news.index] = now

    def prefix_cache(self, before: Gauges, after: Gauges) -> None:
        """What a step has looked for and found in the prefix cache."""
        self._queries.inc(after.prefix_queries - before.prefix_queries)
        self._hits.inc(after.prefix_hits - before.prefix_hits)

    def finished(self, answering: Answering, position: int, now: float) -> None:
        """All answers to a prompt have ended."""
        self._latency.observe(now - answering.started)
        for answer in answering.answers(position):
            self._metrics.ended.labels(self._name, answer.finish_reason).inc()

    def count_audio_seconds(self, seconds: float) -> None:
        """A recording has been transcribed."""
        self._recordings.inc()
        self._audio.inc(seconds)

    def restarted(self) -> None:
        """A dead engine is started again."""
        self._restarts.inc()

    def state(self, gauges: Gauges, *, proven: bool, alive: bool) -> None:
        """The engine as it is now."""
        metrics, name = self._metrics, self._name
        metrics.running.labels(name).set(gauges.running if alive else 0)
        metrics.waiting.labels(name).set(gauges.waiting if alive else 0)
        metrics.cache.labels(name).set(gauges.cache_usage if alive else 0)
        metrics.proven.labels(name).set(proven)
        metrics.alive.labels(name).set(alive)
