"""What Prometheus reads at ``/metrics``: vLLM's names behind ``ingot_``."""

from __future__ import annotations

from collections.abc import Sequence

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

        def counter(name: str, text: str, labels: Sequence[str] = _LABEL) -> Counter:
            return Counter(f"ingot_{name}", text, labels, registry=own)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"ingot_{name}", text, _LABEL, registry=own)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"ingot_{name}_seconds", text, _LABEL, buckets=buckets, registry=own)

        latency, ttft = "From a request's start to its end.", "From a request's start to its first token."
        self.latency = histogram("e2e_request_latency", latency, _SECONDS)
        self.first = histogram("time_to_first_token", ttft, _FIRST_SECONDS)
        self.between = histogram("inter_token_latency", "Between two tokens of an answer.", _TOKEN_SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        left = "Generated tokens, also for clients that had left."
        self.new_tokens = counter("generation_tokens", left)
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.ended = counter("request_success", "Answers that ended.", (*_LABEL, "finished_reason"))
        self.recordings = counter("audio_requests", "Recordings that were transcribed.")
        self.restarts = counter("engine_restarts", "Times that a dead engine was started again.")
        self.audio = counter("audio_seconds", "Their seconds of audio.")
        self.running = gauge("num_requests_running", "Requests in the batch.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait.")
        self.cache = gauge("kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1.")
        self.proven = gauge("engine_proven", "1: nothing speaks against the engine's proof.")
        self.alive = gauge("engine_alive", "1: the engine takes requests.")

    def of(self, name: str) -> EngineMetrics:
        return EngineMetrics(self, name)

    def text(self) -> bytes:
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
        if not news.token_ids:
            return
        before = answering.last.get((position, news.index))
        if before is not None:
            self._between.observe(now - before)
        elif not answering.last:
            self._first.observe(now - answering.started)
        answering.last[position, news.index] = now

    def prefix_cache(self, before: Gauges, after: Gauges) -> None:
        self._queries.inc(after.prefix_queries - before.prefix_queries)
        self._hits.inc(after.prefix_hits - before.prefix_hits)

    def finished(self, answering: Answering, position: int, now: float) -> None:
        self._latency.observe(now - answering.started)
        for answer in answering.answers(position):
            self._metrics.ended.labels(self._name, answer.finish_reason).inc()

    def count_audio_seconds(self, seconds: float) -> None:
        self._recordings.inc()
        self._audio.inc(seconds)

    def restarted(self) -> None:
        self._restarts.inc()

    def state(self, gauges: Gauges, *, proven: bool, alive: bool) -> None:
        metrics, name = self._metrics, self._name
        metrics.running.labels(name).set(gauges.running if alive else 0)
        metrics.waiting.labels(name).set(gauges.waiting if alive else 0)
        metrics.cache.labels(name).set(gauges.cache_usage if alive else 0)
        metrics.proven.labels(name).set(proven)
        metrics.alive.labels(name).set(alive)
